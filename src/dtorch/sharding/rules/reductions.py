"""Reductions: sharding a reduced dim gives a partial result where the reduction has a reduce op."""

from __future__ import annotations

from typing import Any

import torch

from ..builder import Builder, Value
from ..call import OpCall
from ..labels import LINEAR_OPS, Labels, PartialRow
from ..rule import ProgramFn, Rule, RuleFn

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_aten = torch.ops.aten


def reduced_dims(call: OpCall) -> tuple[int, ...]:
    """The dims that a reduction removes: its ``dim`` argument, all dims where it is absent or None."""
    return call.dims("dim", len(call.specs[0].shape))


def reduction(op: str | None, partial: tuple[str, ...] = ()) -> RuleFn:
    """Rule of a reduction whose partial results combine by ``op`` (None: the reduced dims stay whole).

    ``partial`` names the reduce ops under which a partial input gives a partial output.
    """

    def shard(call: OpCall) -> Labels:
        ndim = len(call.specs[0].shape)
        dims = reduced_dims(call)
        labels: list[Any] = list(_LETTERS[:ndim])
        kept = [None if d in dims else labels[d] for d in range(ndim)] if call.arg("keepdim") else [labels[d] for d in range(ndim) if d not in dims]
        if op is None:
            labels = [None if d in dims else c for d, c in enumerate(labels)]
        reduce = {_LETTERS[d]: op for d in dims} if op is not None else {}
        nonempty = frozenset(_LETTERS[d] for d in dims) if op in ("max", "min") else frozenset()
        rows = [PartialRow((True,), partial)] if partial else []
        return Labels([labels], [kept] * len(call.outs), reduce, rows, nonempty=nonempty)

    return shard


def mean(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value]:
    """Mean over a sharded dim: the sum, a partial, divided by the global count, so uneven pieces weigh right."""
    x, spec = args[0], call.specs[0]
    dims = list(reduced_dims(call))
    count = 1
    for d in dims:
        count *= spec.shape[d]
    total = builder.op(_aten.sum.dim_IntList, x, dims, call.arg("keepdim", False), dtype=call.outs[0].dtype)
    return [builder.op(_aten.div.Tensor, total, count)]


def sharded_on_reduced(call: OpCall) -> bool:
    """Whether the input is split along a reduced dim."""
    return any(call.specs[0].sharding_axes(d) for d in reduced_dims(call))


def when_sharded(program: Any) -> ProgramFn:
    """Use a program only where the reduced dims are split; elsewhere the row is cheaper."""

    def guarded(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> Any:
        return program(builder, call, args, kwargs) if sharded_on_reduced(call) else None

    return guarded


TABLE = {
    "sum": Rule(reduction("sum", LINEAR_OPS)),
    "mean": Rule(reduction(None, LINEAR_OPS), when_sharded(mean)),
    "amax": Rule(reduction("max", ("max",))),
    "amin": Rule(reduction("min", ("min",))),
    "max.default": Rule(reduction("max", ("max",))),
    "min.default": Rule(reduction("min", ("min",))),
    "prod": Rule(reduction("prod", ("prod",))),
    "any": Rule(reduction("max", ("max",))),
    "all": Rule(reduction("min", ("min",))),
}
