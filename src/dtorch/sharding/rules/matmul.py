"""Matrix products, written as einsum subscripts."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from ..builder import Builder, Value
from ..call import OpCall
from ..labels import Labels, PartialRow
from ..rule import ProgramFn, Rule, RuleFn


def product(first: str, second: str, out: str) -> RuleFn:
    """Rule of a bilinear product with these subscripts: sharding the contracted label gives a partial sum."""
    inner = next(c for c in first if c not in out)

    def shard(call: OpCall) -> Labels:
        return Labels([first, second], [out], {inner: "sum"}, [PartialRow((True, False)), PartialRow((False, True))])

    return shard


def added_product(first: str, second: str, out: str) -> RuleFn:
    """Rule of ``beta * input + alpha * first @ second``: the contracted dim stays whole, the added input broadcasts."""

    def shard(call: OpCall) -> Labels:
        shape, full = call.specs[0].shape, call.outs[0].shape
        skip = len(full) - len(shape)
        added = [out[skip + d] if n == full[skip + d] else None for d, n in enumerate(shape)]
        whole = [[c if c in out else None for c in side] for side in (first, second)]
        return Labels([added, *whole], [out], partial=[PartialRow((True, True, False)), PartialRow((True, False, True))])

    return shard


def product_then_add(func: OpOverload) -> ProgramFn:
    """Program of an added product whose contracted dim is sharded: the product as a partial, then one addition."""

    def program(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value] | None:
        if call.arg("alpha") != 1 or call.arg("beta") != 1:
            return None
        product = builder.op(func, args[1], args[2])
        return [builder.op(torch.ops.aten.add.Tensor, product, args[0])]

    return program


def summed_product(call: OpCall) -> Labels:
    """``addbmm``: the sum over batches and contracted dim is whole."""
    return _added(call, [[None, "m", None], [None, None, "n"]])


def outer_product(call: OpCall) -> Labels:
    """``addr``: the outer product of two vectors, added."""
    return _added(call, [["m"], ["n"]])


def _added(call: OpCall, factors: list[list[str | None]]) -> Labels:
    """Labels of a matrix product ``mn`` to which a tensor is added that broadcasts."""
    shape, full = call.specs[0].shape, call.outs[0].shape
    skip = len(full) - len(shape)
    return Labels([["mn"[skip + d] if n == full[skip + d] else None for d, n in enumerate(shape)], *factors], ["mn"])


def sum_then_add(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value] | None:
    """``addbmm`` where what is summed over is split: the products' sum as a partial, then one addition."""
    if call.arg("alpha") != 1 or call.arg("beta") != 1 or not call.specs[1].dtype.is_floating_point:
        return None
    products = builder.op(_aten.bmm.default, args[1], args[2])
    return [builder.op(_aten.add.Tensor, builder.op(_aten.sum.dim_IntList, products, [0]), args[0])]


def linear(call: OpCall) -> Labels:
    """``x @ weight.T + bias`` kept whole: outer dims of x, and the output features, may be sharded."""
    outer = _LETTERS[: len(call.specs[0].shape) - 1]
    out = outer + ("N" if len(call.specs[1].shape) == 2 else "")
    bias = [["N"]] if len(call.specs) == 3 else []
    reduce = {} if bias else {"K": "sum"}
    inner = "K" if reduce else None
    weight = ["N", inner] if len(call.specs[1].shape) == 2 else [inner]
    rows = [PartialRow((True, False, *[True] * len(bias))), PartialRow((False, True, *[True] * len(bias)))]
    return Labels([[*outer, inner], weight, *bias], [out], reduce, rows)


def linear_then_add(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value] | None:
    """``linear`` with sharded input features: the product as a partial, then the bias once."""
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    if bias is None:
        return None
    return [builder.op(_aten.add.Tensor, builder.op(_aten.linear.default, args[0], args[1]), bias)]


def weight_gradient(call: OpCall) -> Labels:
    """The gradient of a linear layer's weight: what is split of the rows gives a partial sum, without flattening them."""
    outer = _LETTERS[: len(call.specs[0].shape) - 1]
    rows = [PartialRow((True, False)), PartialRow((False, True))]
    return Labels([[*outer, "N"], [*outer, "K"]], ["NK"], dict.fromkeys(outer, "sum"), rows)


def matmul(call: OpCall) -> Labels:
    """``matmul`` kept whole: batch dims broadcast, vectors have no outer dim."""
    a, b = (list(s.shape) for s in call.specs)
    batch = max(len(a), len(b)) - 2
    first = [*_batch(a, b, batch), "M", "K"] if len(a) > 1 else ["K"]
    second = [*_batch(b, a, batch), "K", "N"] if len(b) > 1 else ["K"]
    out = [*_LETTERS[: max(batch, 0)], *(["M"] if len(a) > 1 else []), *(["N"] if len(b) > 1 else [])]
    return Labels([first, second], [out], {"K": "sum"}, [PartialRow((True, False)), PartialRow((False, True))])


def _batch(own: list[int], other: list[int], batch: int) -> list[str | None]:
    """Labels of one side's batch dims, right-aligned; None where a 1 meets a longer dim."""
    dims, theirs = own[:-2], [1] * batch + other[:-2]
    skip = batch - len(dims)
    return [None if n == 1 and theirs[len(theirs) - batch + skip + d] != 1 else _LETTERS[skip + d] for d, n in enumerate(dims)]


_aten = torch.ops.aten
_LETTERS = "abcdefghijklmnopqrstuvwxyz"

TABLE = {
    "mm": Rule(product("mk", "kn", "mn")),
    "bmm": Rule(product("bmk", "bkn", "bmn")),
    "mv": Rule(product("mk", "k", "m")),
    "linear": Rule(linear, linear_then_add, whole=True),
    "matmul": Rule(matmul, whole=True),
    "dtorch::weight_gradient": Rule(weight_gradient),
    "dot": Rule(product("k", "k", "")),
    "vdot": Rule(product("k", "k", "")),
    "addmm": Rule(added_product("mk", "kn", "mn"), product_then_add(_aten.mm.default)),
    "baddbmm": Rule(added_product("bmk", "bkn", "bmn"), product_then_add(_aten.bmm.default)),
    "addbmm": Rule(summed_product, sum_then_add),
    "addr": Rule(outer_product),
    "addmv": Rule(added_product("mk", "k", "m"), product_then_add(_aten.mv.default)),
}
