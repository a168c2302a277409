"""Layer and RMS normalisation: whole along the normalised dims, or composed so that a split one costs small all-reduces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..builder import Builder, Value
from ..call import OpCall
from ..labels import Labels
from ..rule import ProgramFn, Rule
from .compose import aligned, average, cast, letters, named, product, settled, sharded_on, wide

_aten = torch.ops.aten


def normalised_dims(call: OpCall) -> list[int]:
    """The last dims, as many as ``normalized_shape`` has."""
    ndim = len(call.arg("input").shape)
    return list(range(ndim - len(call.arg("normalized_shape")), ndim))


def shard(call: OpCall) -> Labels:
    """The outer dims may be sharded; normalised dims, weight and bias stay whole."""
    dims = letters(len(call.arg("input").shape), normalised_dims(call))
    weights = len(call.specs) - 1
    whole = [None] * len(normalised_dims(call))
    return Labels([dims, *[whole] * weights], [dims] * len(call.outs))


def shard_backward(call: OpCall) -> Labels:
    """As forward; the gradients of weight and bias are partial sums over sharded outer dims."""
    inner = normalised_dims(call)
    dims = letters(len(call.arg("input").shape), inner)
    whole = [None] * len(inner)
    weights = sum(call.arg(name) is not None for name in ("weight", "bias"))
    inputs = [dims] * (len(call.specs) - weights) + [whole] * weights
    outs = [dims] * bool(call.arg("output_mask")[0]) + [whole] * sum(map(bool, call.arg("output_mask")[1:]))
    return Labels(inputs, outs, {d: "sum" for d in dims if d is not None})


def when_split(program: ProgramFn) -> ProgramFn:
    """Use a program only where the input, or its gradient, is split along a normalised dim."""

    def guarded(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> Any:
        full = [s for s in call.specs if s.shape == call.arg("input").shape]
        if call.arg("input").shape.numel() == 0 or not any(sharded_on(s, normalised_dims(call)) for s in full):
            return None
        return program(builder, call, args, kwargs)

    return guarded


def inverse_root(builder: Builder, square: Value, eps: float) -> Value:
    """1 / sqrt(square + eps)."""
    return builder.op(_aten.rsqrt.default, builder.op(_aten.add.Scalar, square, eps))


def layer_norm(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value]:
    """(x - mean) * rstd * weight + bias, mean and variance from sums over the pieces."""
    dims = normalised_dims(call)
    given = named(call, args, kwargs)
    x = wide(builder, settled(builder, given["input"]))
    mean = average(builder, x, dims)
    centred = builder.op(_aten.sub.Tensor, x, mean)
    rstd = inverse_root(builder, average(builder, product(builder, centred, centred), dims), call.arg("eps"))
    out = product(builder, centred, rstd)
    if given["weight"] is not None:
        out = product(builder, out, settled(builder, given["weight"]))
    if given["bias"] is not None:
        out = builder.op(_aten.add.Tensor, out, settled(builder, given["bias"]))
    return [cast(builder, v, m.dtype) for v, m in zip((out, mean, rstd), call.outs, strict=True)]


def rms_norm(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value]:
    """x * rstd * weight, the mean square from sums over the pieces."""
    dims = normalised_dims(call)
    given = named(call, args, kwargs)
    x = wide(builder, settled(builder, given["input"]))
    eps = call.arg("eps", torch.finfo(x.spec.dtype).eps)
    rstd = inverse_root(builder, average(builder, product(builder, x, x), dims), eps)
    out = product(builder, x, rstd)
    if given["weight"] is not None:
        out = product(builder, out, settled(builder, given["weight"]))
    return [cast(builder, v, m.dtype) for v, m in zip((out, rstd), call.outs, strict=True)]


def placed_alike(builder: Builder, grad: Value, x: Value, dims: Sequence[int]) -> tuple[Value, Value]:
    """Gradient and input, without partials, both placed like the one that is split along the normalised dims."""
    grad, x = settled(builder, grad), settled(builder, x)
    if sharded_on(x.spec, dims):
        return aligned(builder, grad, x), x
    return grad, aligned(builder, x, grad)


def layer_norm_backward(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value]:
    """Gradients of ``layer_norm``: two small all-reduces for the input's."""
    given = named(call, args, kwargs)
    grad, x = placed_alike(builder, given["grad_out"], given["input"], normalised_dims(call))
    mean, rstd = settled(builder, given["mean"]), settled(builder, given["rstd"])
    unit = product(builder, builder.op(_aten.sub.Tensor, wide(builder, x), mean), rstd)
    return _gradients(builder, call, wide(builder, grad), unit, rstd, given["weight"], centred=True)


def rms_norm_backward(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value]:
    """Gradients of ``rms_norm``: one small all-reduce for the input's."""
    given = named(call, args, kwargs)
    grad, x = placed_alike(builder, given["grad_out"], given["input"], normalised_dims(call))
    rstd = settled(builder, given["rstd"])
    unit = product(builder, wide(builder, x), rstd)
    return _gradients(builder, call, wide(builder, grad), unit, rstd, given["weight"], centred=False)


def _gradients(
    builder: Builder, call: OpCall, grad: Value, unit: Value, rstd: Value, weight: Value | None, centred: bool
) -> list[Value]:
    """Gradients of input, weight and bias, as the output mask wants them; ``unit`` is the input normalised."""
    dims, mask = normalised_dims(call), call.arg("output_mask")
    outer = [d for d in range(len(unit.spec.shape)) if d not in dims]
    outs: list[Value] = []
    if mask[0]:
        inner = grad if weight is None else product(builder, grad, settled(builder, weight))
        slope = product(builder, unit, average(builder, product(builder, inner, unit), dims))
        gx = builder.op(_aten.sub.Tensor, inner, slope)
        gx = builder.op(_aten.sub.Tensor, gx, average(builder, inner, dims)) if centred else gx
        outs.append(product(builder, gx, rstd))
    if mask[1]:
        outs.append(_over(builder, product(builder, grad, unit), outer))
    if centred and mask[2]:
        outs.append(_over(builder, grad, outer))
    return [cast(builder, v, m.dtype) for v, m in zip(outs, call.outs, strict=True)]


def _over(builder: Builder, value: Value, dims: Sequence[int]) -> Value:
    """The sum over the outer dims, left partial where they are sharded."""
    return builder.op(_aten.sum.dim_IntList, value, list(dims)) if dims else value


TABLE = {
    "native_layer_norm": Rule(shard, when_split(layer_norm)),
    "native_layer_norm_backward": Rule(shard_backward, when_split(layer_norm_backward)),
    "_fused_rms_norm": Rule(shard, when_split(rms_norm), whole=True),
    "_fused_rms_norm_backward": Rule(shard_backward, when_split(rms_norm_backward)),
}
