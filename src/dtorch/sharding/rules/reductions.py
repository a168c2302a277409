"""Reductions: sharding a reduced dim gives a partial result where the reduction has a reduce op."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from ...core.placements import Partial
from ..builder import Builder, Value
from ..call import OpCall
from ..labels import LINEAR_OPS, Labels, PartialRow
from ..rule import ProgramFn, Rule, RuleFn
from .compose import cast, has_empty_piece, letters, settled, sharded_on
from .leafwise import with_room
from .pieces import lengths

_aten = torch.ops.aten
_NARROW = (torch.float16, torch.bfloat16)


def reduced_dims(call: OpCall) -> tuple[int, ...]:
    """The dims that a reduction removes: its ``dim`` argument, all dims where it is absent, None or empty."""
    if call.arg("dim") == [] and call.func.overloadpacket.__name__ in ("any", "all"):
        return ()
    return call.dims("dim", len(call.specs[0].shape))


def reduction(op: str | None, partial: tuple[str, ...] = (), nonempty: bool = False) -> Callable[[OpCall], Labels]:
    """Rule of a reduction whose partial results combine by ``op`` (None: the reduced dims stay whole).

    Args:
        partial: the reduce ops under which a partial input gives a partial output.
        nonempty: the operator refuses to reduce nothing.
    """

    def shard(call: OpCall) -> Labels:
        ndim = len(call.specs[0].shape)
        dims = reduced_dims(call)
        every = letters(ndim)
        kept = [None if d in dims else c for d, c in enumerate(every) if call.arg("keepdim") or d not in dims]
        ins = every if op is not None else letters(ndim, dims)
        gone = [c for d, c in enumerate(every) if d in dims and c is not None]
        reduce = dict.fromkeys(gone, op) if op is not None else {}
        rows = [PartialRow((True,), partial)] if partial else []
        return Labels([ins], [kept] * len(call.outs), reduce, rows, nonempty=frozenset(gone if nonempty else ()))

    return shard


def linear_sum(call: OpCall) -> Labels:
    """``sum``: linear, but where it casts what it adds to a dtype that drops some of it."""
    source, target = call.specs[0].dtype, call.outs[0].dtype
    drops = target == torch.bool or (not is_integral(source) and is_integral(target))
    return reduction("sum", () if drops else LINEAR_OPS)(call)


def is_integral(dtype: torch.dtype) -> bool:
    """Whether a dtype holds no fractions."""
    return not (dtype.is_floating_point or dtype.is_complex)


def when_sharded(program: Any) -> ProgramFn:
    """Use a program only where the reduced dims are split; elsewhere the row is cheaper."""

    def guarded(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> Any:
        return program(builder, call, args, kwargs) if sharded_on(call.specs[0], reduced_dims(call)) else None

    return guarded


def mean(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value]:
    """Mean over a sharded dim: the sum, a partial, divided by the global count, so uneven pieces weigh right.

    The sum of half precision numbers is kept in single precision, where it has room.
    """
    dims, dtype = list(reduced_dims(call)), call.outs[0].dtype
    count = math.prod(call.specs[0].shape[d] for d in dims)
    room = torch.float32 if dtype in _NARROW else dtype
    total = builder.op(_aten.sum.dim_IntList, args[0], dims, call.arg("keepdim", False), dtype=room)
    return [cast(builder, builder.op(_aten.div.Tensor, total, count), dtype)]


def truth(op: str) -> RuleFn:
    """Rule of ``any`` and ``all``; a number that is partial is not zero by its pieces, so only a bool stays partial."""

    def shard(call: OpCall) -> Labels:
        return reduction(op, (op,) if call.specs[0].dtype == torch.bool else ())(call)

    return shard


def least(dtype: torch.dtype) -> Any:
    """What changes no maximum."""
    if dtype.is_floating_point:
        return -math.inf
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def greatest(dtype: torch.dtype) -> Any:
    """What changes no minimum."""
    if dtype.is_floating_point:
        return math.inf
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def filled(builder: Builder, value: Value, dims: tuple[int, ...], neutral: Any) -> Value:
    """The value with one neutral element in every piece that is empty along some of these dims."""
    split: Mapping[int, list[int]] = {
        d: [int(n == 0) for n in lengths(value.spec, d)] for d in dims if sharded_on(value.spec, [d])
    }
    return with_room(builder, value, split, neutral)


def extreme(op: OpOverload, kind: str, neutral: Any) -> ProgramFn:
    """Program of a maximum or minimum where some piece is empty."""

    def program(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value] | None:
        dims = reduced_dims(call)
        if not sharded_on(call.specs[0], dims) or not has_empty_piece(call.specs[0], dims):
            return None
        kinds = {p.reduce_op for p in args[0].spec.placements if isinstance(p, Partial)}
        # Its own reduction may wait: the neutral element is neutral to it too, but not to any other.
        value = args[0] if kinds <= {kind} else settled(builder, args[0])
        value = filled(builder, value, dims, neutral(call.specs[0].dtype))
        return [builder.op(op, value, list(dims), call.arg("keepdim", False))]

    return program


def both_extremes(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value]:
    """``aminmax``: a minimum and a maximum."""
    dims, keepdim = list(reduced_dims(call)), call.arg("keepdim", False)
    return [builder.op(op, args[0], dims, keepdim) for op in (_aten.amin.default, _aten.amax.default)]


def trace(call: OpCall) -> Labels:
    """``trace`` of a whole matrix."""
    return Labels([[None, None]], [[]], partial=[PartialRow((True,), LINEAR_OPS)])


def trace_split(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value]:
    """The sum of the diagonal, which stays split."""
    return [builder.op(_aten.sum.default, builder.op(_aten.diagonal.default, args[0]), dtype=call.outs[0].dtype)]


_MAX = Rule(reduction("max", ("max",), nonempty=True), extreme(_aten.amax.default, "max", least))
_MIN = Rule(reduction("min", ("min",), nonempty=True), extreme(_aten.amin.default, "min", greatest))

TABLE = {
    "sum": Rule(linear_sum),
    "nansum": Rule(reduction("sum")),
    "count_nonzero": Rule(reduction("sum")),
    "mean": Rule(reduction(None, LINEAR_OPS), when_sharded(mean)),
    "amax": _MAX,
    "amin": _MIN,
    "max.default": _MAX,
    "min.default": _MIN,
    "aminmax": Rule(reduction(None), when_sharded(both_extremes)),
    "prod": Rule(reduction("prod", ("prod",))),
    "any": Rule(truth("max")),
    "all": Rule(truth("min")),
    "_is_any_true": Rule(truth("max")),
    "_is_all_true": Rule(truth("min")),
    "trace": Rule(trace, trace_split),
}
