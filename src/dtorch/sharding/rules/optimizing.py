"""Fused optimizers: a parameter, its gradient and its state are split alike, and every element is by itself.

Adagrad's says that it writes the number of steps, which is whole everywhere: it has no rule.
"""

from __future__ import annotations

from ...core.spec import Spec
from ..call import OpCall, leaves, schema_of
from ..labels import Labels
from ..rule import Rule
from .pointwise import broadcast_dims

SHARED = ("state_steps", "lr", "grad_scale", "found_inf")
"""Arguments that are one number for all elements."""


def one_parameter(call: OpCall) -> Labels | None:
    """Any dim may be split; declines lists of several parameters, which need not be split alike."""
    if len(call.args[0]) != 1:
        return None
    shape = call.args[0][0].shape
    names = [a.name for a in schema_of(call.func).arguments]
    given = [*zip(names, call.args, strict=False), *call.kwargs.items()]
    rows = [
        [None] * len(spec.shape) if name in SHARED else broadcast_dims(spec.shape, shape)
        for name, value in given
        for spec in leaves(value, Spec)
    ]
    return Labels(rows, [])


TABLE = {name: Rule(one_parameter, changing=True) for name in ("_fused_adam", "_fused_adamw", "_fused_sgd")}
