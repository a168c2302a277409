"""Which parts of which source pieces make up each target piece, and how much of that comes from another device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from ..core.mesh import coordinates
from ..core.spec import Box, Spec

Part = tuple[int, list[int], list[int], list[int]]
"""(source piece, offset in source, offset in target, size), the last three per dim, in elements."""

Parts = list[list[Part]]
"""For each target piece, the parts that make it up."""

Segment = tuple[int, int, int]
"""A run of a dim that a source piece holds: (start, length, what it adds to the piece's number)."""


def parts_of(source: Spec, target: Spec, partial_axes: Sequence[int] = ()) -> Parts:
    """The parts of source pieces inside each target piece; the meshes may differ.

    Args:
        partial_axes: mesh axes on which both are partial alike: there a piece is made from the piece at its own place.
    """
    strides = dict(zip(source.axes, _strides(source.piece_grid), strict=True))
    per_dim = [list(_segments(source, d, strides)) for d in range(len(source.shape))]
    out: Parts = []
    for box, coord in zip(target.boxes, coordinates(target.piece_grid), strict=True):
        at = dict(zip(target.axes, coord, strict=True))
        base = sum(strides[a] * at[a] for a in partial_axes)
        out.append(list(_overlaps(per_dim, box, base)))
    return out


def nbytes_moved(source: Spec, target: Spec) -> int:
    """Bytes that all devices of the target mesh together receive from devices other than themselves.

    On axes that are partial on both sides, a device's own piece counts as what it holds already.
    """
    totals = [math.prod(size) for _, size in target.boxes]
    moved = 0
    for t, own, copies in _holders(source, target):
        held = 0 if own < 0 else _common(source.boxes[own], target.boxes[t])
        moved += (totals[t] - held) * copies
    return moved * source.dtype.itemsize


def _common(a: Box, b: Box) -> int:
    """Elements in both boxes."""
    pairs = zip(*a, *b, strict=True)
    return math.prod(max(0, min(s + n, t + m) - max(s, t)) for s, n, t, m in pairs)


def _holders(source: Spec, target: Spec) -> Iterator[tuple[int, int, int]]:
    """(target piece, source piece that the same device holds or -1, number of devices so)."""
    mesh = target.mesh
    if source.mesh is mesh:
        axes = sorted({*source.axes, *target.axes})
        copies = mesh.size() // math.prod(mesh.shape[a] for a in axes)
        for place in coordinates([mesh.shape[a] for a in axes]):
            at = dict(zip(axes, place, strict=True))
            whole = [at.get(a, 0) for a in range(mesh.ndim)]
            yield target.piece_of(whole), source.piece_of(whole), copies
        return
    same_kind = source.mesh.device_type == mesh.device_type
    held = dict(zip(source.mesh.ids, coordinates(source.mesh.shape), strict=True)) if same_kind else {}
    for coord, device in zip(coordinates(mesh.shape), mesh.ids, strict=True):
        yield target.piece_of(coord), source.piece_of(held[device]) if device in held else -1, 1


def _strides(grid: Sequence[int]) -> list[int]:
    """Row-major strides of a grid of pieces."""
    return [math.prod(grid[i + 1 :]) for i in range(len(grid))]


def _segments(spec: Spec, dim: int, strides: dict[int, int]) -> Iterator[Segment]:
    """The segments of a dim, in order."""
    axes = [a for a in spec.sharding_axes(dim) if a in strides]
    if not axes:
        yield 0, spec.shape[dim], 0
        return
    start = 0
    for place, size in zip(coordinates([spec.mesh.shape[a] for a in axes]), spec.sizes_on(axes[-1]), strict=True):
        yield start, size, sum(strides[a] * c for a, c in zip(axes, place, strict=True))
        start += size


def _overlaps(per_dim: list[list[Segment]], box: tuple, base: int) -> Iterator[Part]:
    """Parts of source pieces inside a target box."""
    rows = []
    for segments, offset, size in zip(per_dim, *box, strict=True):
        end = offset + size
        rows.append(
            [
                (add, max(offset - s, 0), max(s - offset, 0), min(s + n, end) - max(s, offset))
                for s, n, add in segments
                if s < end and s + n > offset and n and size
            ]
        )
    for combination in itertools.product(*rows):
        number, from_offset, to_offset, lengths = base, [], [], []
        for add, a, b, length in combination:
            number += add
            from_offset.append(a)
            to_offset.append(b)
            lengths.append(length)
        yield number, from_offset, to_offset, lengths
