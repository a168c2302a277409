"""Batch normalisation: whole along what is averaged, or composed from small sums; running statistics are written in place."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..builder import Builder, Value
from ..call import OpCall, written_args
from ..labels import Labels
from ..rule import Rule
from .compose import aligned, average, cast, letters, named, product, settled, total, wide
from .normalization import inverse_root

_aten = torch.ops.aten
CHANNEL = "c"


def _dims(call: OpCall, averaged: bool) -> list[str | None]:
    """Labels of the input: where batch and positions are averaged over, only channels may be sharded."""
    ndim = len(call.arg("input").shape)
    dims = letters(ndim, [d for d in range(ndim) if averaged])
    return [*dims[:1], CHANNEL, *[d and d.upper() for d in dims[2:]]]


def _labels(call: OpCall, training: bool) -> tuple[list[list[Any]], list[str | None]]:
    """Labels of every tensor argument, and of the input; vectors over channels carry the channel's."""
    full = call.arg("input").shape
    dims = _dims(call, training)
    return [dims if s.shape == full else [CHANNEL if n else None for n in s.shape] for s in call.specs], dims


def forward(call: OpCall) -> Labels | None:
    """In training only channels are independent; otherwise every element is, and saved statistics are alike or empty."""
    inputs, dims = _labels(call, call.arg("training", False) or bool(written_args(call.func)))
    outputs = [dims, *[[CHANNEL if n else None for n in m.shape] for m in call.outs[1:]]]
    every = frozenset(d for d in dims if d is not None)
    saved = tuple(range(1, len(outputs)))
    return Labels(inputs, outputs, nonempty=every, alike=dict.fromkeys(every, saved))


def backward(call: OpCall) -> Labels:
    """As forward; outside training the gradients of weight and bias are partial sums over sharded elements."""
    inputs, dims = _labels(call, call.arg("train"))
    outputs = [list(dims) if len(m.shape) > 1 else [CHANNEL] for m in call.outs]
    every = frozenset(d for d in dims if d is not None)
    return Labels(inputs, outputs, {d: "sum" for d in every if d != CHANNEL}, nonempty=every)


def _averaged(x: Value) -> list[int]:
    return [d for d in range(len(x.spec.shape)) if d != 1]


def _column(builder: Builder, vector: Value, like: Value) -> Value:
    """A vector over channels, shaped to broadcast over the input."""
    shape = [1, vector.spec.shape[0], *[1] * (len(like.spec.shape) - 2)]
    return builder.op(_aten.view.default, settled(builder, vector), shape)


def _vector(builder: Builder, column: Value) -> Value:
    return builder.op(_aten.view.default, column, [column.spec.shape[1]])


def normalise(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value] | None:
    """(x - mean) * invstd * weight + bias with global mean and variance, which also move the running statistics."""
    given = named(call, args, kwargs)
    x, training = wide(builder, settled(builder, given["input"])), given.get("training", False)
    count = math.prod(x.spec.shape[d] for d in _averaged(x))
    if x.spec.shape.numel() == 0 or (training and count == 1):
        return None
    if training:
        mean = average(builder, x, _averaged(x))
        centred = builder.op(_aten.sub.Tensor, x, mean)
        variance = average(builder, product(builder, centred, centred), _averaged(x))
        _move(builder, given.get("running_mean"), _vector(builder, mean), given["momentum"])
        unbiased = builder.op(_aten.mul.Tensor, _vector(builder, variance), count / (count - 1))
        _move(builder, given.get("running_var"), unbiased, given["momentum"])
    else:
        mean, variance = (wide(builder, _column(builder, given[n], x)) for n in ("running_mean", "running_var"))
        centred = builder.op(_aten.sub.Tensor, x, mean)
    invstd = inverse_root(builder, variance, given["eps"])
    out = product(builder, centred, invstd)
    if given["weight"] is not None:
        out = product(builder, out, _column(builder, given["weight"], x))
    if given["bias"] is not None:
        out = builder.op(_aten.add.Tensor, out, _column(builder, given["bias"], x))
    saved = [_vector(builder, mean), _vector(builder, invstd)]
    if call.outs[1].shape != saved[0].spec.shape:
        saved = [builder.op(_aten.new_empty.default, v, list(call.outs[1].shape)) for v in saved]
    return [cast(builder, v, m.dtype) for v, m in zip((out, *saved), call.outs, strict=True)]


def _move(builder: Builder, running: Value | None, new: Value, momentum: float) -> None:
    """Move a running statistic towards a new value, in place."""
    if running is None:
        return
    kept = builder.op(_aten.mul.Tensor, wide(builder, settled(builder, running)), 1 - momentum)
    moved = builder.op(_aten.add.Tensor, kept, builder.op(_aten.mul.Tensor, new, momentum))
    placed = aligned(builder, cast(builder, moved, running.spec.dtype), running)
    builder.local(_aten.copy_.default, [running, placed], {}, [running.spec])


def gradients(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value] | None:
    """Gradients of input, weight and bias from two sums per channel."""
    given = named(call, args, kwargs)
    x = settled(builder, given["input"])
    if x.spec.shape.numel() == 0:
        return None
    grad = wide(builder, aligned(builder, settled(builder, given["grad_out"]), x))
    x = wide(builder, x)
    names = ("save_mean", "save_invstd") if given["train"] else ("running_mean", "running_var")
    mean, scale = (wide(builder, _column(builder, given[n], x)) for n in names)
    scale = scale if given["train"] else inverse_root(builder, scale, given["eps"])
    unit = product(builder, builder.op(_aten.sub.Tensor, x, mean), scale)
    sums = [total(builder, v, _averaged(x)) for v in (product(builder, grad, unit), grad)]
    outs: list[Value] = []
    if given["output_mask"][0]:
        outs.append(_of_input(builder, given, grad, unit, scale, sums))
    outs += [_vector(builder, v) for v, wanted in zip(sums, given["output_mask"][1:], strict=True) if wanted]
    return [cast(builder, v, m.dtype) for v, m in zip(outs, call.outs, strict=True)]


def _of_input(builder: Builder, given: dict[str, Any], grad: Value, unit: Value, scale: Value, sums: list[Value]) -> Value:
    """The input's gradient; in training the mean and variance depend on it too."""
    if given["train"]:
        count = math.prod(grad.spec.shape[d] for d in _averaged(grad))
        slope, offset = (builder.op(_aten.div.Tensor, v, count) for v in sums)
        grad = builder.op(_aten.sub.Tensor, builder.op(_aten.sub.Tensor, grad, product(builder, unit, slope)), offset)
    if given["weight"] is not None:
        scale = product(builder, scale, _column(builder, given["weight"], grad))
    return product(builder, grad, scale)


TABLE = {
    "_native_batch_norm_legit": Rule(forward, normalise, writes=True),
    "_native_batch_norm_legit_no_training": Rule(forward, normalise),
    "native_batch_norm_backward": Rule(backward, gradients),
}
