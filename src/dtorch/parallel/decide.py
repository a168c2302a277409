"""Deciding how every weight of a module lies: the plan's rows, the heads and the stages brought together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from ..core.errors import PlacementError, four_parts
from ..core.mesh import DeviceMesh, Family
from ..core.placements import Partial, Placement, Shard
from ..core.spec import Spec
from .axes import EXPERT, PIPELINE, SHARDED, TENSOR, placements_on, size_of
from .experts import are_experts
from .heads import head_sizes, heads_at, is_packed
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
    modules = dict(module.named_modules(remove_duplicate=False))
    deciding = _Deciding(modules, plan, size_of(mesh, TENSOR), size_of(mesh, SHARDED), size_of(mesh, EXPERT))
    tensors = {join(owner, n): (owner, n, t) for owner, m in deciding.modules.items() for n, t in own_tensors(m).items()}
    first: dict[int, str] = {}
    splits: dict[str, dict[str, Placement]] = {}
    for full, (owner, name, tensor) in tensors.items():
        main = first.setdefault(id(tensor), full)
        splits[main] = splits.get(main) or deciding.split(owner, name, tensor)
    for full, (_, _, tensor) in tensors.items():
        if first[id(tensor)] == full and isinstance(tensor, nn.Parameter):
            splits[full] = deciding.sharded(full, splits[full], tensor.shape)
    specs, tied = {}, {}
    for full, (owner, _, tensor) in tensors.items():
        home, main = meshes[stages.of[owner]], first[id(tensor)]
        specs[full] = Spec.make(home, placements_on(home, splits[main]), tensor.shape, tensor.dtype)
        if main != full:
            tied[full] = main
    if deciding.hosts > 1 and SPREAD not in deciding.remarks:
        deciding.remarks[NO_EXPERTS] = None
    remarks = (*deciding.remarks, *(f"{name} is {main}: one parameter, placed once" for name, main in tied.items()))
    family = Family((mesh, *meshes))
    return Layout(type(module).__name__, mesh, meshes, stages, plan.source, specs, tied, remarks, family)


def join(owner: str, name: str) -> str:
    """Qualified name of a module's own parameter or buffer."""
    return f"{owner}.{name}" if owner else name


@dataclass
class _Deciding:
    """The placement of single tensors by a plan, on axes of so many devices: ``tp``, ``fsdp`` and ``ep``."""

    modules: Mapping[str, nn.Module]
    plan: Plan
    devices: int
    shards: int
    hosts: int
    remarks: dict[str, None] = field(default_factory=dict)

    def split(self, owner: str, name: str, tensor: torch.Tensor) -> dict[str, Placement]:
        """Placements by axis name of one parameter or buffer."""
        choice = self.plan.choice(owner, name)
        experts = tensor.shape[0] if tensor.ndim else 0
        if (choice is None or isinstance(choice, str)) and self._spreads(choice, self.modules[owner], experts):
            self.remarks[SPREAD] = None
            return {EXPERT: Shard(0), TENSOR: Shard(0)}
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

    def _spreads(self, choice: str | None, owner: nn.Module, count: int) -> bool:
        """Whether the experts that a weight belongs to, so many, are spread: over ``ep``, or over a ``tp`` that they fill."""
        fills = 1 < self.devices <= count and choice is not None and STYLES[choice].side is not None
        return (self.hosts > 1 or fills) and are_experts(owner)

    def sharded(self, name: str, split: dict[str, Placement], shape: torch.Size) -> dict[str, Placement]:
        """The placements of a parameter with that over ``fsdp`` among them: its longest dim that is split over no axis.

        Raises:
            PlacementError: the plan's own placement over ``fsdp`` splits a dim that another axis splits, or is partial.
        """
        if SHARDED in split:
            _check_sharded(name, split, len(shape))
            return split
        if self.shards == 1:
            return split
        dim = free_dim(shape, split, self.shards)
        if dim is None:
            self.remarks[WHOLE] = None
            return split
        return {**split, SHARDED: Shard(dim)}

    def _by_heads(self, owner: str, name: str, length: int, dim: int) -> dict[str, Placement]:
        heads = heads_at(owner, self.modules)
        if heads is None:
            return {TENSOR: Shard(dim)}
        if is_packed(join(owner, name)):
            self.remarks[PACKED] = None
        elif heads.key_value < self.devices:
            self.remarks[REPEATED.format(heads.key_value, self.devices)] = None
        sizes = head_sizes(heads, join(owner, name), length, self.devices)
        return {} if sizes is None else {TENSOR: Shard(dim, sizes)}


def free_dim(shape: torch.Size, split: Mapping[str, Placement], shards: int) -> int | None:
    """The longest dim that no axis splits yet and that gives each of so many devices a part; None where there is none."""
    taken = {p.dim % len(shape) for p in split.values() if isinstance(p, Shard)}
    free = [d for d, n in enumerate(shape) if d not in taken and n >= shards]
    return max(free, key=lambda d: shape[d], default=None)


def _check_sharded(name: str, split: Mapping[str, Placement], ndim: int) -> None:
    own = split[SHARDED]
    others = {p.dim % ndim for axis, p in split.items() if axis != SHARDED and isinstance(p, Shard)}
    if isinstance(own, Partial) or (isinstance(own, Shard) and own.dim % ndim in others):
        raise PlacementError(
            four_parts(
                f"placements {dict(split)!r} of {name}",
                "over fsdp a weight is whole, or split along a dim that no other axis splits: so it is gathered at one stroke",
                "parallelize(module, mesh, plan)",
                "name another dim for fsdp, or leave fsdp out of the row to have one chosen",
            )
        )


SPREAD = "experts are spread over ep and tp: each device has whole ones"
NO_EXPERTS = "no experts that ep could spread by itself: it splits the batch"
WHOLE = "weights without a dim as long as fsdp that tp leaves whole are whole on fsdp"
PACKED = "a matrix that holds several one after the other is cut as one, so what it gives has to be moved to meet its partner"
REPEATED = "{} key/value heads for {} devices: every device keeps all of those, and its own share of the query heads"
