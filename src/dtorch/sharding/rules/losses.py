"""Elementwise and samplewise losses: one row without reduction; sums and means are composed, so they use the global count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..builder import Builder, Value
from ..call import OpCall
from ..labels import Labels
from ..rule import Rule, RuleFn
from . import pointwise
from .compose import NARROW, cast, changed, named, settled, tensor_names

_aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2
"""Values of the argument ``reduction``."""

Count = Callable[[OpCall], int]


def elements(call: OpCall) -> int:
    """How many elements a mean is over: those of the input."""
    return call.arg("self").shape.numel()


def samples(call: OpCall) -> int:
    """How many samples a mean is over: rows of a matrix; a vector is one."""
    shape = call.arg("self").shape
    return shape[0] if len(shape) == 2 else 1


def unreduced(row: RuleFn) -> RuleFn:
    """A row for the call without reduction; the others are composed."""

    def shard(call: OpCall) -> Any:
        return row(call) if call.arg("reduction", MEAN) == NONE else None

    return shard


def unless_mean(row: RuleFn) -> RuleFn:
    """A row for gradients that need no count."""

    def shard(call: OpCall) -> Any:
        return row(call) if call.arg("reduction", MEAN) != MEAN else None

    return shard


def samplewise(call: OpCall) -> Labels:
    """Whole rows of a matrix may lie apart; a vector is one sample. Weights are per class."""
    first = call.arg("self").shape

    def dims(shape: torch.Size, name: str = "") -> list[str | None]:
        rows = len(first) == 2 and name != "weight"
        return ["n" if rows and d == 0 else None for d in range(len(shape))]

    inputs = [dims(s.shape, n) for s, n in zip(call.specs, tensor_names(call), strict=True)]
    return Labels(inputs, [dims(m.shape) for m in call.outs])


def reduced(count: Count) -> Any:
    """Program of a loss that is summed or averaged: each sample's loss, their sum, and the global count."""

    def program(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value] | None:
        reduction = call.arg("reduction", MEAN)
        if reduction == NONE:
            return None
        args, kwargs = changed(call, args, kwargs, reduction=NONE)
        results = builder.op(call.func, *args, **kwargs)
        loss, *rest = results if isinstance(results, list) else [results]
        dtype = torch.float32 if loss.spec.dtype in NARROW else loss.spec.dtype
        value = settled(builder, builder.op(_aten.sum.default, loss, dtype=dtype))
        if reduction == MEAN:
            value = builder.op(_aten.div.Tensor, value, count(call))
        return [cast(builder, value, call.outs[0].dtype), *rest]

    return program


def averaged(count: Count) -> Any:
    """Program of a mean's gradient: the sum's, divided by the global count."""

    def program(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value] | None:
        if call.arg("reduction", MEAN) != MEAN:
            return None
        # In half precision 1 / count loses digits, so the gradient is divided there and not its scale.
        early = call.outs[0].dtype not in NARROW
        grad = named(call, args, kwargs)["grad_output"]
        grad = builder.op(_aten.div.Tensor, grad, count(call)) if early else grad
        args, kwargs = changed(call, args, kwargs, grad_output=grad, reduction=SUM)
        out = builder.op(call.func, *args, **kwargs)
        return [out if early else builder.op(_aten.div.Tensor, out, count(call))]

    return program


def _pair(name: str, row: RuleFn, count: Count, forward: str = "") -> dict[str, Rule]:
    """Rules of a loss and its gradient."""
    return {
        f"{name}{forward}": Rule(unreduced(row), reduced(count)),
        f"{name}_backward": Rule(unless_mean(row), averaged(count)),
    }


TABLE = {
    **_pair("mse_loss", pointwise.labels, elements),
    **_pair("smooth_l1_loss", pointwise.labels, elements),
    **_pair("huber_loss", pointwise.labels, elements),
    **_pair("soft_margin_loss", pointwise.labels, elements),
    **_pair("binary_cross_entropy", pointwise.labels, elements),
    "binary_cross_entropy_with_logits": Rule(unreduced(pointwise.labels), reduced(elements)),
    **_pair("multi_margin_loss", samplewise, samples),
    **_pair("multilabel_margin_loss", samplewise, samples, "_forward"),
}
