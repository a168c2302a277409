"""Making global tensors of what there is: plain tensors, nested lists, or local pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..core.errors import PlacementError, UsageError, four_parts
from ..core.mesh import DeviceMesh, checked_mesh, coordinates
from ..core.placements import REPLICATE, Partial, Placement, Placements, Shard
from ..core.spec import Spec
from ..sharding import layouts
from . import moving, whole

Pieces = Sequence[torch.Tensor] | Callable[[tuple[int, ...]], torch.Tensor]


def distribute(cls: type, data: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement] | None, copy: bool = True) -> Any:
    """A plain tensor on a mesh: each piece is cut here and sent once. Without ``copy`` the caller gives its memory away."""
    layouts.dense(data, "dtorch.Tensor(data, ...)")
    whole.needs(mesh, cls)
    wanted = Spec.make(mesh, (REPLICATE,) * mesh.ndim if placements is None else placements, data.shape, data.dtype)
    landing = wanted.replace([REPLICATE if isinstance(p, Partial) else p for p in wanted.placements])
    if not landing.axes:
        tensor = moving.put(cls, data, mesh, copy)
        return moving.move(tensor, tensor._spec.replace(wanted.placements))
    data = data.detach()
    pieces = [data[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].contiguous() for box in landing.boxes]
    return moving.move(moving.put_pieces(cls, landing, pieces, copy), wanted)


def assemble(cls: type, pieces: Pieces, mesh: DeviceMesh, placements: Sequence[Placement]) -> Any:
    """A global tensor of local tensors; see ``dtorch.from_local``."""
    coords = list(coordinates(checked_mesh(mesh).shape))
    local = [pieces(c) for c in coords] if callable(pieces) else list(pieces)
    if len(local) != len(coords) or not all(isinstance(t, torch.Tensor) for t in local):
        raise UsageError(
            four_parts(
                f"{len(local)} local tensors for {mesh!r}",
                "one local torch.Tensor per device, row-major",
                "from_local(local, ...)",
                f"give {len(coords)} tensors, or a function of the coordinate",
            )
        )
    for tensor in local:
        layouts.dense(tensor, "from_local(local, ...)")
    whole.needs(mesh, cls)
    by_coord = dict(zip(coords, local, strict=True))
    spec = spec_of(by_coord, mesh, tuple(placements), local[0])
    for coord, tensor in by_coord.items():
        if tuple(tensor.shape) != spec.local_box(coord)[1] or tensor.dtype != spec.dtype:
            raise PlacementError(
                four_parts(
                    f"local tensor {tuple(tensor.shape)} {tensor.dtype} at {coord}",
                    f"placements {spec.placements} make it {spec.local_box(coord)[1]} {spec.dtype}",
                    "from_local(local, mesh, placements)",
                    "give local tensors that differ only along the sharded dims",
                )
            )
    held = [by_coord[next(c for c in coords if spec.piece_of(c) == piece)] for piece in range(len(spec.boxes))]
    return moving.put_pieces(cls, spec, held)


def spec_of(local: dict[tuple[int, ...], torch.Tensor], mesh: DeviceMesh, placements: Placements, first: torch.Tensor) -> Spec:
    """The spec whose local shapes are the given ones: sizes are read off the local tensors."""
    if len(placements) != mesh.ndim:
        Spec.make(mesh, placements, first.shape, first.dtype)
    ndim = first.ndim
    sharded: dict[int, list[int]] = {}
    for axis, p in enumerate(placements):
        if isinstance(p, Shard):
            if not -ndim <= p.dim < ndim:
                Spec.make(mesh, placements, first.shape, first.dtype)
            sharded.setdefault(p.dim % ndim, []).append(axis)
    shape, final = list(first.shape), list(placements)
    for dim, axes in sharded.items():
        leaves = [local[_at(mesh.ndim, axes, c)].shape[dim] for c in coordinates([mesh.shape[a] for a in axes])]
        shape[dim] = sum(leaves)
        for axis in reversed(axes):
            final[axis] = Shard(dim, tuple(leaves))
            k = mesh.shape[axis]
            leaves = [sum(leaves[i : i + k]) for i in range(0, len(leaves), k)]
    return Spec.make(mesh, final, shape, first.dtype)


def _at(ndim: int, axes: Sequence[int], at: Sequence[int]) -> tuple[int, ...]:
    coord = [0] * ndim
    for a, c in zip(axes, at, strict=True):
        coord[a] = c
    return tuple(coord)
