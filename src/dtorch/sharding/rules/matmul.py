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


_aten = torch.ops.aten

TABLE = {
    "mm": Rule(product("mk", "kn", "mn")),
    "bmm": Rule(product("bmk", "bkn", "bmn")),
    "mv": Rule(product("mk", "k", "m")),
    "dot": Rule(product("k", "k", "")),
    "vdot": Rule(product("k", "k", "")),
    "addmm": Rule(added_product("mk", "kn", "mn"), product_then_add(_aten.mm.default)),
    "baddbmm": Rule(added_product("bmk", "bkn", "bmn"), product_then_add(_aten.bmm.default)),
    "addmv": Rule(added_product("mk", "k", "m"), product_then_add(_aten.mv.default)),
}
