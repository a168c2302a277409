"""Plans that run a function of the user's on local tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..core.mesh import DeviceMesh
from ..core.placements import REPLICATE, Placements
from ..core.program import Apply
from ..core.spec import Spec
from .builder import Builder, Value
from .plan import Plan
from .planner import plan_into


def varying_axes(mesh: DeviceMesh, placements: Placements) -> set[int]:
    """Mesh axes along which a tensor's pieces differ."""
    return {axis for axis, p in enumerate(placements) if p != REPLICATE and mesh.shape[axis] > 1}


def plan_mapped(name: str, specs: Sequence[Spec], outs: Sequence[Placements], mesh: DeviceMesh) -> Plan:
    """The plan of a call of a mapped function. What it gives is known by its placements only.

    Its first input is the function, which stands where a number that every device has would stand.

    Args:
        name: the function's, for reports and errors.
        specs: of the tensors that it takes.
        outs: placements of the tensors that it gives.
    """
    function = Spec.make(mesh, (REPLICATE,) * mesh.ndim, (), torch.float32)
    builder = Builder(name, [function, *specs], plan_into)
    held, *tensors = builder.inputs
    axes = sorted({axis for placements in (*[s.placements for s in specs], *outs) for axis in varying_axes(mesh, placements)})
    slots = [builder.unknown_slot(sorted(varying_axes(mesh, placements)), mesh) for placements in outs]
    builder.steps.append(Apply(held.slot, [v.slot for v in tensors], slots, axes, builder.mesh_number(mesh)))
    return Plan(builder.define([Value(slot, function) for slot in slots]), (), None, (), "program", mesh, False)
