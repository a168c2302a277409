"""Values whose pieces hold other parts of a tensor than its placements alone would give them.

Inside a program a piece may hold any runs of a dim: the first and the last block of a sequence, say, or one head several
times. A ``Laid`` says which, and ``moved`` brings a value from one such layout to another in one collective.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ...core.mesh import coordinates
from ...core.placements import REPLICATE, Partial, Shard
from ...core.spec import Spec
from ..builder import Builder, Value
from ..exchange import Part
from .pieces import Segment, leaf_number, leaves, lengths, shards_of

Runs = list[Segment]
"""The parts of a dim that one leaf holds, in its own order: (start in the whole, length)."""

Row = tuple[int, int, int, int]
"""What one leaf has of another: (number of the other leaf, offset there, offset here, length)."""


@dataclass(frozen=True)
class Laid:
    """A spec that gives local shapes, and for some of its dims what their leaves hold.

    Attributes:
        spec: mesh, placements, shape and dtype; without ``runs`` it tells everything.
        runs: by dim, the runs of each leaf. They need not cover the dim, and may hold a part more than once.
    """

    spec: Spec
    runs: Mapping[int, Sequence[Runs]] = field(default_factory=dict)

    def of(self, dim: int) -> list[Runs]:
        """The runs of each leaf of a dim."""
        given = self.runs.get(dim)
        return [joined([leaf]) for leaf in leaves(self.spec, dim)] if given is None else [list(runs) for runs in given]

    def at(self, dim: int, coord: Sequence[int]) -> Runs:
        """The runs of a dim that the device at a coordinate holds."""
        return self.of(dim)[leaf_number(self.spec, dim, coord)]

    def shaped(self, tail: Sequence[int], dtype: torch.dtype) -> Laid:
        """The layout of a tensor with the same three leading dims, others after them, and a dtype; row-major."""
        spec = self.spec
        return Laid(Spec.make(spec.mesh, spec.placements, (*spec.shape[:3], *tail), dtype), self.runs)

    def shared(self, axes: Collection[int], op: str = "sum") -> Laid:
        """The layout of a partial along some axes, on which this one is whole."""
        spec = self.spec
        placements = [Partial(op) if a in axes else p for a, p in enumerate(spec.placements)]
        return Laid(Spec.make(spec.mesh, placements, spec.shape, spec.dtype), self.runs)

    def same(self, other: Laid) -> bool:
        """Whether every device holds the same parts in both."""
        if self.spec.partial_axes != other.spec.partial_axes or len(self.spec.shape) != len(other.spec.shape):
            return False
        dims = range(len(self.spec.shape))
        return all(_split_by(self, d) == _split_by(other, d) and self.of(d) == other.of(d) for d in dims)


def _split_by(laid: Laid, dim: int) -> tuple[int, ...]:
    return tuple(a for a in laid.spec.sharding_axes(dim) if a in laid.spec.axes)


def joined(runs: Iterable[Segment]) -> Runs:
    """Runs without empty ones, neighbours put together."""
    out: Runs = []
    for start, n in runs:
        if out and n and out[-1][0] + out[-1][1] == start:
            out[-1] = (out[-1][0], out[-1][1] + n)
        elif n:
            out.append((start, n))
    return out


def count(runs: Runs) -> int:
    """Number of elements in runs."""
    return sum(n for _, n in runs)


def split_spec(spec: Spec, cuts: Mapping[int, tuple[Sequence[int], Sequence[int]]], shape: Sequence[int]) -> Spec:
    """A row-major spec split along each given dim over (axes, leaf sizes); on all other axes it is whole."""
    placed: dict[int, Shard] = {}
    for dim, (axes, sizes) in cuts.items():
        placed.update(shards_of(spec.mesh, dim, axes, sizes))
    return Spec.make(spec.mesh, [placed.get(a, REPLICATE) for a in range(spec.mesh.ndim)], shape, spec.dtype)


def moved(builder: Builder, value: Value, source: Laid, target: Laid, kind: str = "all_to_all") -> Value:
    """The value in another layout, by one collective that moves only what a device lacks.

    Args:
        source: how it is laid, each element on one piece only; partial on the same axes as the target.
        kind: name of the collective for reports.
    """
    if source.same(target):
        return Value(value.slot, value.spec)
    assert source.spec.partial_axes == target.spec.partial_axes
    parts = list(_parts(source, target))
    nbytes, axes = _traffic(source.spec, target.spec, parts)
    names = "+".join(target.spec.mesh.axis_names()[a] for a in axes)
    return builder.exchange(value, target.spec, parts, [list(size) for _, size in target.spec.boxes], kind, names, nbytes)


def _parts(source: Laid, target: Laid) -> Iterator[list[Part]]:
    """For each target piece, the parts of source pieces that make it up."""
    spec, dims = target.spec, range(len(target.spec.shape))
    strides = {a: math.prod(source.spec.piece_grid[i + 1 :]) for i, a in enumerate(source.spec.axes)}
    rows = [[list(_rows(runs, source.of(d))) for runs in target.of(d)] for d in dims]
    numbers = [_numbers(source.spec, d, strides) for d in dims]
    for place in coordinates(spec.piece_grid):
        coord = [0] * spec.mesh.ndim
        for a, c in zip(spec.axes, place, strict=True):
            coord[a] = c
        base = sum(strides[a] * coord[a] for a in source.spec.partial_axes)
        chosen = [rows[d][leaf_number(spec, d, coord)] for d in dims]
        yield [_part(base, numbers, combination) for combination in itertools.product(*chosen)]


def _part(base: int, numbers: Sequence[Sequence[int]], rows: Sequence[Row]) -> Part:
    piece = base + sum(numbers[d][row[0]] for d, row in enumerate(rows))
    return piece, [row[1] for row in rows], [row[2] for row in rows], [row[3] for row in rows]


def _numbers(spec: Spec, dim: int, strides: Mapping[int, int]) -> list[int]:
    """What each leaf of a dim adds to the number of its piece."""
    axes = spec.sharding_axes(dim)
    places = coordinates([spec.mesh.shape[a] for a in axes])
    return [sum(strides.get(a, 0) * c for a, c in zip(axes, place, strict=True)) for place in places]


def _rows(wanted: Runs, held: Sequence[Runs]) -> Iterator[Row]:
    """Where the wanted runs lie among the leaves that hold them."""
    to = 0
    for start, n in wanted:
        for leaf, runs in enumerate(held):
            offset = 0
            for first, m in runs:
                low, high = max(start, first), min(start + n, first + m)
                if low < high:
                    yield leaf, offset + low - first, to + low - start, high - low
                offset += m
        to += n


def _traffic(source: Spec, target: Spec, parts: Sequence[Sequence[Part]]) -> tuple[int, list[int]]:
    """Bytes that all devices receive from others, and the mesh axes along which they travel."""
    elements, axes = 0, set()
    held = list(coordinates(source.piece_grid))
    for coord in coordinates(target.mesh.shape):
        own = source.piece_of(coord)
        for piece, _, _, size in parts[target.piece_of(coord)]:
            if piece != own:
                elements += math.prod(size)
                axes |= {a for a, c in zip(source.axes, held[piece], strict=True) if c != coord[a]}
    return elements * source.dtype.itemsize, sorted(axes)


def natural(spec: Spec, dim: int, axes: Sequence[int]) -> list[Runs]:
    """What each place over some axes holds of a dim, all places on its other axes together; in order of position."""
    own = spec.sharding_axes(dim)
    kept = [own.index(a) for a in axes]
    found: dict[tuple[int, ...], Runs] = {}
    for place, leaf in zip(coordinates([spec.mesh.shape[a] for a in own]), leaves(spec, dim), strict=True):
        found.setdefault(tuple(place[i] for i in kept), []).append(leaf)
    return [joined(found[place]) for place in coordinates([spec.mesh.shape[a] for a in axes])]


def sizes(runs: Sequence[Runs]) -> list[int]:
    """Leaf sizes."""
    return [count(leaf) for leaf in runs]


def cut_of(spec: Spec, dim: int, axes: Sequence[int]) -> list[int] | None:
    """Leaf sizes of a dim that is split over exactly these axes."""
    return lengths(spec, dim) if spec.sharding_axes(dim) == tuple(axes) else None
