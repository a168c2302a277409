"""Elementwise operators with broadcasting: shard any dim; linear ones also carry partials."""

from __future__ import annotations

import cmath
from collections.abc import Callable, Sequence
from typing import Any

from ...core.spec import Spec
from ..call import OpCall
from ..labels import ANY_OP, Labels, PartialRow
from ..rule import Rule

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def broadcast_dims(shape: Sequence[int], out: Sequence[int]) -> list[str | None]:
    """Labels of an input of ``shape`` that broadcasts to ``out``: right-aligned, None where a 1 is stretched."""
    skip = len(out) - len(shape)
    return [_LETTERS[skip + d] if n == out[skip + d] else None for d, n in enumerate(shape)]


def labels(call: OpCall, partial: Sequence[PartialRow] = ()) -> Labels | None:
    """Labels of an elementwise call; declines where an input does not broadcast to the output."""
    if not call.outs or any(len(s.shape) > len(call.outs[0].shape) for s in call.specs):
        return None
    shape = call.outs[0].shape
    return Labels(
        [broadcast_dims(s.shape, shape) for s in call.specs], [_LETTERS[: len(shape)]] * len(call.outs), partial=partial
    )


def additive(call: OpCall) -> Labels | None:
    """Addition and its kin: partial if every operand is a tensor and all are partial together."""
    tensors = isinstance(call.args[1], Spec) if len(call.args) > 1 else True
    return labels(call, [PartialRow((True,) * len(call.specs))] if tensors and _floating(call) and _finite(call) else ())


def multiplicative(call: OpCall) -> Labels | None:
    """Multiplication: linear in each operand alone."""
    if len(call.specs) == 1:
        return labels(call, [PartialRow((True,))] if _floating(call) and _finite(call) else ())
    return labels(call, [PartialRow((True, False)), PartialRow((False, True))] if _floating(call) else ())


def division(call: OpCall) -> Labels | None:
    """True division by a number but zero: linear. A tensor may hold zeros, and parts divided by them do not add up."""
    plain = call.arg("rounding_mode") is None and _floating(call) and len(call.specs) == 1 and _numbers(call, bool)
    return labels(call, [PartialRow((True,))] if plain else ())


def linear(call: OpCall) -> Labels | None:
    """Operators linear in their one operand."""
    return labels(call, [PartialRow((True,))])


def moving(call: OpCall) -> Labels | None:
    """Copies: every element goes through unchanged, so any partial stays one, unless its dtype changes."""
    same = call.outs[0].dtype == call.specs[0].dtype
    return labels(call, [PartialRow((True,), ANY_OP)] if same else ())


def copying(call: OpCall) -> Labels | None:
    """``copy``: the source broadcasts to the destination; the destination's placement decides."""
    return labels(call, [PartialRow((True, True), ANY_OP)] if call.specs[0].dtype == call.specs[-1].dtype else ())


def in_turn(call: OpCall) -> Labels | None:
    """Elementwise without linearity."""
    return labels(call)


def with_buffer(call: OpCall) -> Labels | None:
    """``logsigmoid``, with a buffer that is as large as the input on some devices and empty on others."""
    shape = call.specs[0].shape
    shapes = [*(spec.shape for spec in call.specs), *(m.shape for m in call.outs)]
    rows = [_LETTERS[: len(s)] if s == shape else [None] * len(s) for s in shapes]
    alike = {c: [i for i, m in enumerate(call.outs) if m.shape != shape] for c in _LETTERS[: len(shape)]}
    return Labels(rows[: len(call.specs)], rows[len(call.specs) :], alike=alike)


def _floating(call: OpCall) -> bool:
    """No operand changes dtype on the way: a partial that is rounded piece by piece would not add up."""
    return all(s.dtype == call.outs[0].dtype for s in call.specs if s.shape)


def _finite(call: OpCall) -> bool:
    """No number is infinite: parts of either sign would become infinities that have no sum."""
    return _numbers(call, cmath.isfinite)


def _numbers(call: OpCall, holds: Callable[[Any], bool]) -> bool:
    """Whether something holds for every number of a call; what comes with each call is finite and not zero."""
    return all(holds(a) for a in (*call.args, *call.kwargs.values()) if type(a) in (float, complex, int, bool))


ANY = Rule(in_turn, changing=True)

TABLE = {
    "add": Rule(additive, changing=True),
    "sub": Rule(additive, changing=True),
    "mul": Rule(multiplicative, changing=True),
    "div": Rule(division, changing=True),
    "neg": Rule(linear),
    "clone": Rule(moving),
    "_to_copy": Rule(moving),
    "copy": Rule(copying),
    "lift_fresh_copy": Rule(moving),
    "fill": Rule(in_turn, changing=True),
    "where": ANY,
    "masked_fill": ANY,
    "threshold_backward": ANY,
    "native_dropout_backward": ANY,
    "lerp": ANY,
    "addcmul": ANY,
    "addcdiv": ANY,
    "clamp": ANY,
    "zero": Rule(linear),
    "isin.Tensor_Scalar": ANY,
    "_conj": Rule(linear),
    "_neg_view": Rule(linear),
    "detach": Rule(moving),
    "alias": Rule(moving),
    "lift_fresh": Rule(moving),
    "contiguous": Rule(moving),
    "rsub": Rule(in_turn, changing=True),
    "silu_backward": ANY,
    "gelu_backward": ANY,
    "tanh_backward": ANY,
    "sigmoid_backward": ANY,
    "elu_backward": ANY,
    "leaky_relu_backward": ANY,
    "hardtanh_backward": ANY,
    "hardswish_backward": ANY,
    "hardsigmoid_backward": ANY,
    "softplus_backward": ANY,
    "hardshrink_backward": ANY,
    "softshrink_backward": ANY,
    "mish_backward": ANY,
    "rrelu_with_noise_backward": ANY,
    "floor_divide": ANY,
    "log_sigmoid_forward": Rule(with_buffer),
    "log_sigmoid_backward": Rule(with_buffer),
}
