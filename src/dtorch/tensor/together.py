"""Several tensors moved in one plan, so that what they send goes together: one collective where each would have one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..core.placements import REPLICATE, Partial
from ..core.spec import Spec
from ..sharding.builder import Builder
from ..sharding.plan import Plan
from ..sharding.planner import plan_into
from ..sharding.together import redistribute_together
from . import moving


def move_together(tensors: Sequence[Any], targets: Sequence[Spec], reason: str, holds: int = 1) -> list[Any]:
    """The same values under the targets' meshes and placements, outside autograd; a tensor itself where nothing changes.

    Args:
        reason: what reports call it.
        holds: how many tensors to make over the memory of each that changes.

    Returns:
        For each tensor one, then for each a second one, and so on.
    """
    changed = [i for i, t in enumerate(tensors) if not moving.same_pieces(t._spec, targets[i])]
    made = iter(_run([tensors[i] for i in changed], [targets[i] for i in changed], reason, holds) if changed else ())
    out = []
    for _ in range(holds):
        for i, tensor in enumerate(tensors):
            out.append(next(made) if i in changed else moving.move(tensor, targets[i]))
    return out


def _run(tensors: list[Any], targets: list[Spec], reason: str, holds: int) -> list[Any]:
    sources = [t._spec for t in tensors]

    def make() -> Plan:
        builder = Builder(reason, sources, plan_into)
        outs = redistribute_together(builder, builder.inputs, targets) * holds
        specs = tuple(out.spec for out in outs)
        return Plan(builder.define(outs), specs, ..., tuple(builder.comms), "redistribute", targets[0].mesh, False)

    return moving.run_plan((reason, holds, *sources, *targets), make, tensors, explicit=True)


class RedistributeTogether(torch.autograd.Function):
    """Several redistributions as one; so is the way back of their gradients."""

    @staticmethod
    def forward(ctx: Any, targets: Sequence[Spec], reason: str, *tensors: Any) -> tuple[Any, ...]:
        ctx.sources, ctx.reason = [t._spec for t in tensors], reason
        ctx.set_materialize_grads(False)
        moved = move_together(tensors, targets, reason)
        return tuple(moving.held_anew(t) if t is old else t for t, old in zip(moved, tensors, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return (None, None, *gradients_together(grads, ctx.sources, ctx.reason))


def redistributed_together(tensors: Sequence[Any], targets: Sequence[Spec], reason: str) -> list[Any]:
    """``move_together``, differentiably."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return list(RedistributeTogether.apply(targets, reason, *tensors))
    return move_together(tensors, targets, reason)


def gradients_together(grads: Sequence[Any], homes: Sequence[Spec], reason: str) -> list[Any]:
    """Gradients brought to where the tensors that they belong to lie, summed up where those are partial.

    A gradient that is None or a plain tensor stays what it is.
    """
    placed = [i for i, g in enumerate(grads) if hasattr(g, "_spec")]
    targets = [_landing(grads[i]._spec, homes[i]) for i in placed]
    out = list(grads)
    for i, grad in zip(placed, redistributed_together([grads[i] for i in placed], targets, reason), strict=True):
        out[i] = grad
    return out


def _landing(grad: Spec, home: Spec) -> Spec:
    placements = [REPLICATE if isinstance(p, Partial) else p for p in home.placements]
    if grad.mesh is home.mesh and grad.placements == tuple(placements):
        return grad
    return Spec.make(home.mesh, placements, grad.shape, grad.dtype, moving.dense_stride(grad))
