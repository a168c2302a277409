"""Deciding how every weight of a module lies: the plan's rows, the heads and the stages brought together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from ..core.mesh import DeviceMesh, Family
from ..core.placements import Placement, Shard
from ..core.spec import Spec
from .axes import PIPELINE, TENSOR, placements_on, size_of
from .heads import head_sizes, heads_at
from .layout import Layout
from .plan import Plan
from .stages import Stages, own_tensors
from .styles import STYLES, split_dim


def decide(module: nn.Module, mesh: DeviceMesh, stages: Stages, plan: Plan) -> Layout:
    """The spec of every parameter and buffer. Tied ones go by the first of their names that the plan says something of.

    Raises:
        PlacementError: placements that do not fit a weight.
    """
    homes = mesh.unbind(PIPELINE)
    meshes = tuple(homes * (stages.count // len(homes)))
    deciding = _Deciding(dict(module.named_modules(remove_duplicate=False)), plan, size_of(mesh, TENSOR))
    tensors = {join(owner, n): (owner, n, t) for owner, m in deciding.modules.items() for n, t in own_tensors(m).items()}
    first: dict[int, str] = {}
    splits: dict[str, dict[str, Placement]] = {}
    for full, (owner, name, tensor) in tensors.items():
        main = first.setdefault(id(tensor), full)
        splits[main] = splits.get(main) or deciding.split(owner, name, tensor)
    specs, tied = {}, {}
    for full, (owner, _, tensor) in tensors.items():
        home, main = meshes[stages.of[owner]], first[id(tensor)]
        specs[full] = Spec.make(home, placements_on(home, splits[main]), tensor.shape, tensor.dtype)
        if main != full:
            tied[full] = main
    remarks = (*deciding.remarks, *(f"{name} is {main}: one parameter, placed once" for name, main in tied.items()))
    family = Family((mesh, *meshes))
    return Layout(type(module).__name__, mesh, meshes, stages, plan.source, specs, tied, remarks, family)


def join(owner: str, name: str) -> str:
    """Qualified name of a module's own parameter or buffer."""
    return f"{owner}.{name}" if owner else name


@dataclass
class _Deciding:
    """The placement of single tensors by a plan, on a tensor-parallel axis of ``devices``."""

    modules: Mapping[str, nn.Module]
    plan: Plan
    devices: int
    remarks: dict[str, None] = field(default_factory=dict)

    def split(self, owner: str, name: str, tensor: torch.Tensor) -> dict[str, Placement]:
        """Placements by axis name of one parameter or buffer."""
        choice = self.plan.choice(owner, name)
        if choice is None or (isinstance(choice, str) and name in self.modules[owner]._buffers):
            return {}
        if not isinstance(choice, str):
            return dict(choice)
        dim = split_dim(STYLES[choice], self.modules[owner], name, tensor.ndim)
        if dim is None or self.devices == 1:
            return {}
        if STYLES[choice].packed:
            self.remarks[PACKED] = None
        return self._by_heads(owner, name, tensor.shape[dim], dim)

    def _by_heads(self, owner: str, name: str, length: int, dim: int) -> dict[str, Placement]:
        heads = heads_at(owner, self.modules)
        if heads is None:
            return {TENSOR: Shard(dim)}
        if heads.key_value < self.devices:
            self.remarks[REPEATED.format(heads.key_value, self.devices)] = None
        sizes = head_sizes(heads, join(owner, name), length, self.devices)
        return {} if sizes is None else {TENSOR: Shard(dim, sizes)}


PACKED = "a matrix that holds several one after the other is cut as one, so what it gives has to be moved to meet its partner"
REPEATED = "{} key/value heads for {} devices: every device keeps all of those, and its own share of the query heads"
