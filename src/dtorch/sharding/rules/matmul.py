"""Matrix products, written as einsum subscripts."""

from __future__ import annotations

import cmath

from ..call import OpCall
from ..labels import Labels, PartialRow
from ..rule import Rule, RuleFn


def product(first: str, second: str, out: str) -> RuleFn:
    """Rule of a bilinear product with these subscripts: sharding the contracted label gives a partial sum."""
    inner = next(c for c in first if c not in out)

    def shard(call: OpCall) -> Labels:
        return Labels([first, second], [out], {inner: "sum"}, [PartialRow((True, False)), PartialRow((False, True))])

    return shard


def added_product(first: str, second: str, out: str) -> RuleFn:
    """Rule of ``beta * input + alpha * first @ second``: the product's, where the input, which broadcasts, is added once."""
    inner = [c for c in first if c in second and c not in out]

    def shard(call: OpCall) -> Labels:
        inputs = [_broadcast(call, out), first, second]
        # Infinitely many times a part is an infinity of either sign, and these have no sum.
        if not all(cmath.isfinite(call.arg(factor)) for factor in ("alpha", "beta")):
            return Labels(inputs, [out])
        rows = [PartialRow((True, True, False)), PartialRow((True, False, True))]
        return Labels(inputs, [out], dict.fromkeys(inner, "sum"), rows, added=dict.fromkeys(inner, (0,)))

    return shard


def outer_product(call: OpCall) -> Labels:
    """``addr``: the outer product of two vectors, added."""
    return Labels([_broadcast(call, "mn"), "m", "n"], ["mn"])


def _broadcast(call: OpCall, out: str, number: int = 0) -> list[str | None]:
    """Labels of an input that broadcasts to the output."""
    shape, full = call.specs[number].shape, call.outs[0].shape
    skip = len(full) - len(shape)
    return [out[skip + d] if n == full[skip + d] else None for d, n in enumerate(shape)]


def linear(call: OpCall) -> Labels:
    """``x @ weight.T + bias`` kept whole; where input features are sharded, the bias is added once."""
    outer = _LETTERS[: len(call.specs[0].shape) - 1]
    out = outer + ("N" if len(call.specs[1].shape) == 2 else "")
    bias = [_broadcast(call, out, 2)] if len(call.specs) == 3 else []
    weight = ["N", "K"] if len(call.specs[1].shape) == 2 else ["K"]
    rows = [PartialRow((True, False, *[True] * len(bias))), PartialRow((False, True, *[True] * len(bias)))]
    return Labels([[*outer, "K"], weight, *bias], [out], {"K": "sum"}, rows, added={"K": (2,)})


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


_LETTERS = "abcdefghijklmnopqrstuvwxyz"

TABLE = {
    "mm": Rule(product("mk", "kn", "mn")),
    "bmm": Rule(product("bmk", "bkn", "bmn")),
    "mv": Rule(product("mk", "k", "m")),
    "linear": Rule(linear, whole=True),
    "matmul": Rule(matmul, whole=True),
    "dtorch::weight_gradient": Rule(weight_gradient),
    "dot": Rule(product("k", "k", "")),
    "vdot": Rule(product("k", "k", "")),
    "addmm": Rule(added_product("mk", "kn", "mn")),
    "baddbmm": Rule(added_product("bmk", "bkn", "bmn")),
    "addbmm": Rule(added_product("bmk", "bkn", "mn")),
    "addr": Rule(outer_product),
    "addmv": Rule(added_product("mk", "k", "m")),
}
