"""Softmax and its kin: whole along the normalised dim, or composed so that a split dim costs only small all-reduces."""

from __future__ import annotations

from typing import Any

import torch

from ..builder import Builder, Value
from ..call import OpCall
from ..labels import Labels
from ..rule import ProgramFn, Rule
from .compose import aligned, cast, has_empty_piece, letters, settled, sharded_on, total, wide

_aten = torch.ops.aten


def shard(call: OpCall) -> Labels:
    """Every dim but the normalised one may be sharded, in all tensors alike."""
    ndim = len(call.specs[0].shape)
    dims = letters(ndim, [call.arg("dim", 0) % ndim] if ndim else [])
    return Labels([dims] * len(call.specs), [dims])


def when_split(program: ProgramFn) -> ProgramFn:
    """Use a program only where some input is split along the normalised dim."""

    def guarded(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> Any:
        ndim = len(call.specs[0].shape)
        dims = [call.arg("dim", 0) % ndim] if ndim else []
        if call.outs[0].shape.numel() == 0 or not any(sharded_on(s, dims) for s in call.specs):
            return None
        return program(builder, call, args, kwargs)

    return guarded


def shifted(builder: Builder, call: OpCall, x: Value) -> tuple[Value, int]:
    """The input minus its maximum along the normalised dim, in the dtype to compute in, and that dim."""
    dim = call.arg("dim") % len(call.specs[0].shape)
    x = settled(builder, x)
    x = cast(builder, x, call.outs[0].dtype) if call.arg("half_to_float") else wide(builder, x)
    top = settled(builder, builder.op(_aten.amax.default, x, [dim], True))
    return builder.op(_aten.sub.Tensor, x, top), dim


def softmax(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value] | None:
    """exp(x - max) / sum(exp(x - max))."""
    if has_empty_piece(call.specs[0], [call.arg("dim") % len(call.specs[0].shape)]):
        return None
    x, dim = shifted(builder, call, args[0])
    e = builder.op(_aten.exp.default, x)
    out = builder.op(_aten.div.Tensor, e, total(builder, e, [dim]))
    return [cast(builder, out, call.outs[0].dtype)]


def log_softmax(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value] | None:
    """(x - max) - log(sum(exp(x - max)))."""
    if has_empty_piece(call.specs[0], [call.arg("dim") % len(call.specs[0].shape)]):
        return None
    x, dim = shifted(builder, call, args[0])
    norm = builder.op(_aten.log.default, total(builder, builder.op(_aten.exp.default, x), [dim]))
    return [cast(builder, builder.op(_aten.sub.Tensor, x, norm), call.outs[0].dtype)]


def safe_softmax(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value] | None:
    """Softmax, but zeros where every input along the dim is minus infinity."""
    dim = call.arg("dim") % len(call.specs[0].shape)
    if has_empty_piece(call.specs[0], [dim]):
        return None
    x = cast(builder, settled(builder, args[0]), call.outs[0].dtype)
    out = builder.op(_aten._softmax.default, x, dim, False)
    top = settled(builder, builder.op(_aten.amax.default, x, [dim], True))
    return [builder.op(_aten.masked_fill.Scalar, out, builder.op(_aten.eq.Scalar, top, float("-inf")), 0.0)]


def gradients(builder: Builder, call: OpCall, args: Any) -> tuple[Value, Value, int]:
    """The gradient and the forward's output, placed alike and in the dtype to compute in, and the normalised dim."""
    dim = call.arg("dim") % len(call.specs[0].shape)
    grad, out = settled(builder, args[0]), settled(builder, args[1])
    if sharded_on(out.spec, [dim]):
        grad = aligned(builder, grad, out)
    else:
        out = aligned(builder, out, grad)
    return wide(builder, grad), wide(builder, out), dim


def softmax_backward(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value]:
    """(grad - sum(grad * out)) * out."""
    grad, out, dim = gradients(builder, call, args)
    inner = total(builder, builder.op(_aten.mul.Tensor, grad, out), [dim])
    gx = builder.op(_aten.mul.Tensor, builder.op(_aten.sub.Tensor, grad, inner), out)
    return [cast(builder, gx, call.outs[0].dtype)]


def log_softmax_backward(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value]:
    """grad - exp(out) * sum(grad)."""
    grad, out, dim = gradients(builder, call, args)
    inner = builder.op(_aten.mul.Tensor, builder.op(_aten.exp.default, out), total(builder, grad, [dim]))
    return [cast(builder, builder.op(_aten.sub.Tensor, grad, inner), call.outs[0].dtype)]


TABLE = {
    "_softmax": Rule(shard, when_split(softmax)),
    "_log_softmax": Rule(shard, when_split(log_softmax)),
    "_safe_softmax": Rule(shard, when_split(safe_softmax)),
    "_softmax_backward_data": Rule(shard, when_split(softmax_backward)),
    "_log_softmax_backward_data": Rule(shard, when_split(log_softmax_backward)),
}
