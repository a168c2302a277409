"""Negative log likelihood: batch dims are labels; split classes are looked up piece by piece, so logits never move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...core.spec import Spec
from ..builder import Builder, Value
from ..call import OpCall
from ..labels import Labels
from ..rule import Rule
from .compose import NARROW, cast, changed, letters, named, settled, sharded_on
from .lookup import Found, checked, column, located, varying
from .losses import MEAN, NONE, SUM

_aten = torch.ops.aten
CLASS = "C"


def class_dim(call: OpCall) -> int:
    """Which dim of the input counts classes: (classes,), (batch, classes) or (batch, classes, height, width)."""
    return 0 if len(call.arg("self").shape) == 1 else 1


def is_each(call: OpCall) -> bool:
    """Whether every target has its own loss; one lone target counts as summed."""
    return call.arg("reduction") == NONE and len(call.arg("self").shape) > 1


def dims_of(call: OpCall) -> tuple[list[str], list[str]]:
    """Labels of the input and of the target."""
    dims = [d for d in letters(len(call.arg("self").shape)) if d is not None]
    at = class_dim(call)
    return [*dims[:at], CLASS, *dims[at + 1 :]], [*dims[:at], *dims[at + 1 :]]


class Likelihood(Labels):
    """Forward: (loss, total weight)."""

    def steps(self, builder: Builder, call: OpCall, args: Any, kwargs: Any, outs: Sequence[Spec]) -> list[Value] | None:
        """Each piece takes the losses of the classes it holds; those of the others are zero in its part."""
        given, dim = named(call, args, kwargs), class_dim(call)
        scores, weight = given["self"], given["weight"]
        if not sharded_on(scores.spec, [dim]):
            return None
        found, skipped = targets(builder, call, scores, given["target"])
        spec = outs[0] if is_each(call) else varying(found.place.spec, (), scores.spec.dtype)
        at = column(builder, found.place, dim)
        picked = builder.local(_aten.gather.default, [scores, dim, at], {}, [varying(at.spec, (), spec.dtype)])[0]
        picked = builder.local(_aten.squeeze.dim, [picked, dim], {}, [spec])[0]
        loss = builder.local(_aten.neg.default, [picked], {}, [spec])[0]
        if weight is None:
            held = builder.local(_aten.logical_not.default, [skipped], {}, [skipped.spec])[0]
        else:
            held = builder.local(_aten.take.default, [weight, found.place], {}, [spec])[0]
            loss = builder.local(_aten.mul.Tensor, [loss, held], {}, [spec])[0]
            held = builder.local(_aten.masked_fill.Scalar, [held, skipped, 0], {}, [spec])[0]
        loss = builder.local(_aten.masked_fill.Scalar, [loss, skipped, 0], {}, [spec])[0]
        if is_each(call):
            return [loss, *builder.local(_aten.new_zeros.default, [scores, []], {}, [outs[1]])]
        total = builder.local(_aten.sum.default, [held], {"dtype": outs[1].dtype}, [outs[1]])
        return [*builder.local(_aten.sum.default, [loss], {}, [outs[0]]), *total]


class LikelihoodGradient(Labels):
    """Backward: the gradient of the input."""

    def steps(self, builder: Builder, call: OpCall, args: Any, kwargs: Any, outs: Sequence[Spec]) -> list[Value] | None:
        """Each piece writes the gradients of the classes it holds into zeros."""
        given, dim = named(call, args, kwargs), class_dim(call)
        grad, scores, weight = given["grad_output"], given["self"], given["weight"]
        if not sharded_on(scores.spec, [dim]):
            return None
        if call.arg("reduction") == MEAN:
            grad = builder.local(_aten.div.Tensor, [grad, given["total_weight"]], {}, [grad.spec])[0]
        found, skipped = targets(builder, call, scores, given["target"])
        spec = varying(found.place.spec, (), scores.spec.dtype)
        if weight is None:
            held = builder.local(_aten.ones_like.default, [found.place], {"dtype": spec.dtype}, [spec])[0]
        else:
            held = builder.local(_aten.take.default, [weight, found.place], {}, [spec])[0]
        slope = builder.local(_aten.mul.Tensor, [held, grad], {}, [spec])[0]
        slope = builder.local(_aten.neg.default, [slope], {}, [spec])[0]
        slope = builder.local(_aten.masked_fill.Scalar, [slope, skipped, 0], {}, [spec])[0]
        zeros = builder.local(_aten.zeros_like.default, [scores], {}, outs)[0]
        at, source = column(builder, found.place, dim), column(builder, slope, dim)
        return builder.local(_aten.scatter_.src, [zeros, dim, at, source], {}, outs)


def targets(builder: Builder, call: OpCall, scores: Value, target: Value) -> tuple[Found, Value]:
    """Where each piece finds the targets' classes, and which targets it skips: ignored ones and those of other pieces."""
    numbers = cast(builder, target, torch.int64)
    dim, ignored = class_dim(call), call.arg("ignore_index")
    checked(builder, numbers, scores.spec.shape[dim], "Target is out of bounds.", ignored)
    found = located(builder, numbers, scores.spec, dim)
    ignore = builder.local(_aten.eq.Scalar, [numbers, ignored], {}, [varying(numbers.spec, (), torch.bool)])[0]
    return found, builder.local(_aten.logical_or.default, [found.outside, ignore], {}, [found.outside.spec])[0]


def forward(call: OpCall) -> Labels | None:
    """Without reduction and summed; a mean is composed."""
    if call.arg("reduction") == MEAN:
        return None
    scores, target = dims_of(call)
    inputs: list[list[str]] = [scores, target] + [[CLASS]] * (len(call.specs) - 2)
    if not is_each(call):
        return Likelihood(inputs, [[], []], dict.fromkeys([CLASS, *target], "sum"), nonempty=frozenset(CLASS))
    alike: dict[str, tuple[int, ...]] = dict.fromkeys([CLASS, *target], (1,))
    return Likelihood(inputs, [target, []], {CLASS: "sum"}, nonempty=frozenset(CLASS), alike=alike)


def mean(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value] | None:
    """The sum of losses divided by the sum of weights."""
    if call.arg("reduction") != MEAN:
        return None
    if call.outs[0].dtype in NARROW:
        loss, weight = _wide_sums(builder, call, args, kwargs)
    else:
        args, kwargs = changed(call, args, kwargs, reduction=SUM)
        loss, weight = (settled(builder, v) for v in builder.op(call.func, *args, **kwargs))
    results = builder.op(_aten.div.Tensor, loss, weight), weight
    return [cast(builder, v, m.dtype) for v, m in zip(results, call.outs, strict=True)]


def _wide_sums(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> tuple[Value, Value]:
    """The sums of losses and of weights in float32: in half precision that of the losses might overflow."""
    given = named(call, args, kwargs)
    args, kwargs = changed(call, args, kwargs, reduction=NONE)
    loss = builder.op(call.func, *args, **kwargs)[0]
    held = builder.op(_aten.ne.Scalar, settled(builder, given["target"]), given["ignore_index"])
    if given["weight"] is not None:
        classes = builder.op(_aten.mul.Tensor, cast(builder, given["target"], torch.int64), held)
        weights = settled(builder, given["weight"])
        each = builder.op(_aten.index_select.default, weights, 0, builder.op(_aten.view.default, classes, [-1]))
        held = builder.op(_aten.mul.Tensor, builder.op(_aten.view.default, each, list(held.spec.shape)), held)
    loss, held = (builder.op(_aten.sum.default, v, dtype=torch.float32) for v in (loss, held))
    return settled(builder, loss), settled(builder, held)


def backward(call: OpCall) -> Labels:
    """Batch and classes; the total weight is global."""
    scores, target = dims_of(call)
    weight = [] if call.arg("weight") is None else [[CLASS]]
    inputs: list[list[str]] = [target if is_each(call) else [], scores, target, *weight, []]
    return LikelihoodGradient(inputs, [scores], nonempty=frozenset(CLASS))


TABLE = {
    "nll_loss_forward": Rule(forward, mean),
    "nll_loss_backward": Rule(backward),
    "nll_loss2d_forward": Rule(forward, mean),
    "nll_loss2d_backward": Rule(backward),
}
