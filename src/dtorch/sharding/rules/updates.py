"""Fused steps of optimizers, on one parameter and what is kept for it: elementwise, so each device updates its piece."""

from __future__ import annotations

from ..call import OpCall
from ..labels import Labels
from ..rule import Rule
from .pointwise import broadcast_dims


def step(call: OpCall) -> Labels | None:
    """Labels of a step: lists hold the parameter, its gradient, moments and number of steps; all else is one number."""
    shape = call.specs[0].shape
    listed = sum(len(a) for a in call.args if isinstance(a, list | tuple))
    rows = [broadcast_dims(s.shape, shape) for s in call.specs[:listed]]
    return Labels([*rows, *([None] * len(s.shape) for s in call.specs[listed:])], [])


TABLE = dict.fromkeys(("_fused_adagrad", "_fused_adam", "_fused_adamw", "_fused_sgd"), Rule(step, changing=True))
