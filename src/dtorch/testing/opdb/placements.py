"""Which placements are tried, and plain tensors placed so."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import torch

from ... import DeviceMesh, Tensor, from_local
from ...core.placements import Partial, Placement, Placements, Replicate, Shard


def choices(mesh: tuple[int, ...], tensor: torch.Tensor, linear: bool) -> list[Placements]:
    """Every placement of a tensor: on each axis replicated, split along each dim, or partial where the operator is linear."""
    partial = linear and (tensor.is_floating_point() or tensor.is_complex())
    on_axis: list[Placement] = [Replicate(), *(Shard(d) for d in range(tensor.ndim)), *([Partial()] if partial else [])]
    return list(itertools.product(on_axis, repeat=len(mesh)))


def drawn(rows: Sequence[Sequence[Placements]], limit: int, seed: str) -> list[tuple[Placements, ...]]:
    """Combinations of the tensors' placements: all, or ``limit`` different ones drawn with a seed.

    Args:
        rows: the choices of each tensor.
    """
    total = math.prod(map(len, rows))
    if total <= limit:
        return list(itertools.product(*rows))
    draw = random.Random(seed)
    if total > 1 << 40:
        return [tuple(draw.choice(row) for row in rows) for _ in range(limit)]
    return [_combination(rows, number) for number in sorted(draw.sample(range(total), limit))]


def two(mesh: tuple[int, ...], rows: Sequence[Sequence[Placements]], seed: str) -> list[tuple[Placements, ...]]:
    """All replicated, and one combination in which every tensor that has a dim is split."""
    whole: tuple[Placements, ...] = tuple((Replicate(),) * len(mesh) for _ in rows)
    draw = random.Random(seed)
    split = tuple(draw.choice([p for p in row if all(isinstance(q, Shard) for q in p)] or [row[0]]) for row in rows)
    return [whole] if split == whole else [whole, split]


def _combination(rows: Sequence[Sequence[Placements]], number: int) -> tuple[Placements, ...]:
    chosen = []
    for row in rows:
        number, at = divmod(number, len(row))
        chosen.append(row[at])
    return tuple(chosen)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with memory that a placed one can have too: without gaps and overlaps, its dims in any order."""
    order = _order(tensor)
    return tensor if tensor.permute(order).is_contiguous() else tensor.contiguous()


def place(tensor: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> Tensor:
    """A global tensor with the value and the strides of a dense plain one; parts of a partial one are all different."""
    order = _order(tensor)
    back = [order.index(d) for d in range(tensor.ndim)]
    moved = tuple(Shard(back[p.dim]) if isinstance(p, Shard) else p for p in placements)
    placed: Any = _place(tensor.detach().permute(order), mesh, moved)
    return placed if order == sorted(order) else placed.permute(back)


def _order(tensor: torch.Tensor) -> list[int]:
    """Dims from the largest stride to the smallest."""
    strides, dims = tensor.stride(), list(range(tensor.ndim))
    return dims if tensor.is_contiguous() else sorted(dims, key=lambda d: strides[d], reverse=True)


def _place(tensor: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> Tensor:
    axes = [a for a, p in enumerate(placements) if isinstance(p, Partial)]
    if not axes:
        return Tensor(tensor, device_mesh=mesh, placements=placements)
    parts = _parts(tensor, math.prod(mesh.shape[a] for a in axes))
    shape = Tensor(tensor, device_mesh=mesh, placements=[Replicate() if isinstance(p, Partial) else p for p in placements])

    def local(coord: tuple[int, ...]) -> torch.Tensor:
        number = 0
        for a in axes:
            number = number * mesh.shape[a] + coord[a]
        offset, size = shape._spec.local_box(coord)
        return parts[number][tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]

    return from_local(local, mesh, placements)


def _parts(whole: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Tensors that sum up to ``whole``; the noise is of its own random stream, and of few bits, so that rounding is small."""
    source: Any = torch.Generator().manual_seed(1)
    noise = [(torch.randint(-8, 9, whole.shape, generator=source) / 4).to(whole.dtype) for _ in range(count - 1)]
    return [*noise, whole - sum(noise)]
