"""How a tensor dim lies over its pieces, and rules for operators that map a run of one dim to a run of another.

The *leaves* of a dim are its pieces in order, over all the mesh axes that split it. Slicing, padding or scattering keeps
their order, so an output dim can stay split over the same axes, with explicit sizes that say how much of it each leaf holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...core.mesh import DeviceMesh, coordinates
from ...core.placements import REPLICATE, Shard, balanced
from ...core.spec import Box, Spec
from ..builder import Varying
from ..call import OpCall
from ..labels import Candidate, Labels

KEPT = "kept"
"""Label of the row that keeps an input as it lies; no dim carries it."""

Segment = tuple[int, int]
"""(start, size) of a leaf."""


def leaves(spec: Spec, dim: int) -> list[Segment]:
    """The leaves of a dim."""
    axes = spec.sharding_axes(dim)
    out = []
    for place in coordinates([spec.mesh.shape[a] for a in axes]):
        offset, size = spec.local_box(at(spec.mesh, axes, place))
        out.append((offset[dim], size[dim]))
    return out


def lengths(spec: Spec, dim: int) -> list[int]:
    """Sizes of the leaves of a dim."""
    return [size for _, size in leaves(spec, dim)]


def leaf_number(spec: Spec, dim: int, coord: Sequence[int]) -> int:
    """Which leaf of a dim the device at a coordinate holds."""
    index = 0
    for a in spec.sharding_axes(dim):
        index = index * spec.mesh.shape[a] + coord[a]
    return index


def at(mesh: DeviceMesh, axes: Sequence[int], place: Sequence[int]) -> tuple[int, ...]:
    """The mesh coordinate with these places along some axes and 0 along the others."""
    coord = [0] * mesh.ndim
    for a, c in zip(axes, place, strict=True):
        coord[a] = c
    return tuple(coord)


def shards_of(mesh: DeviceMesh, dim: int, axes: Sequence[int], sizes: Sequence[int]) -> dict[int, Shard]:
    """The placement on each axis that gives a dim's leaves these sizes."""
    out = {}
    for a in reversed(axes):
        out[a] = Shard(dim, tuple(sizes))
        k = mesh.shape[a]
        sizes = [sum(sizes[i : i + k]) for i in range(0, len(sizes), k)]
    return out


def resized(spec: Spec, dim: int, sizes: Sequence[int], dtype: torch.dtype | None = None) -> Spec:
    """The spec of a tensor like another but for other leaf sizes along a dim, and perhaps another dtype; row-major."""
    split = shards_of(spec.mesh, dim, spec.sharding_axes(dim), sizes)
    shape = (*spec.shape[:dim], sum(sizes), *spec.shape[dim + 1 :])
    return Spec.make(spec.mesh, [split.get(a, p) for a, p in enumerate(spec.placements)], shape, dtype or spec.dtype)


def by_leaf(spec: Spec, dim: int, values: Sequence[Any]) -> Varying:
    """A local argument that each device takes from a list, by the leaf of a dim that it holds."""
    return Varying(lambda coord: values[leaf_number(spec, dim, coord)])


def balanced_leaves(mesh: DeviceMesh, axes: Sequence[int], n: int) -> list[int]:
    """Sizes of n elements split evenly over the first axis, then the next."""
    out = [n]
    for a in axes:
        out = [size for whole in out for size in balanced(whole, mesh.shape[a])]
    return out


def overlap(segment: Segment, low: int, high: int) -> int:
    """How many elements of a segment lie in ``[low, high)``."""
    return max(0, min(segment[0] + segment[1], high) - max(segment[0], low))


def snapped(elements: Sequence[Segment], first: int, step: int, n: int, wanted: Sequence[int]) -> list[int]:
    """Leaf sizes of a dim of length n whose leaves must hold given runs of the positions ``first, first + step, ...``.

    Each cut is as near to that of ``wanted`` sizes as the runs allow.

    Args:
        elements: (number of the first position, count) for each leaf, in order.
    """
    sizes, start, ideal = [], 0, 0
    for number, size in enumerate(wanted):
        ideal += size
        following = [e for e in elements[number + 1 :] if e[1]]
        held = [e for e in elements[: number + 1] if e[1]]
        low = first + (held[-1][0] + held[-1][1] - 1) * step + 1 if held else 0
        high = first + following[0][0] * step if following else n
        end = n if number == len(elements) - 1 else max(start, min(max(ideal, low), high))
        sizes.append(end - start)
        start = end
    return sizes


@dataclass(frozen=True)
class Kept:
    """A rule under which an input's split dims give a split output dim, leaf by leaf.

    Attributes:
        labels: what holds for all other dims, and for partials.
        dims: dims of the first input that the output dim comes from.
        out_dim: the output dim.
        count: number of elements along ``out_dim``, for each output, that come from a box of the first input.
        local: the operator's own arguments on a piece, by schema name, given the call and the piece's box.
        same: the output lies as the first input does; ``count`` and ``out_dim`` then speak of the second input.
    """

    labels: Labels
    dims: tuple[int, ...]
    out_dim: int
    count: Callable[[Box], Sequence[int]]
    local: Callable[[Box], Mapping[str, Any]] | None = None
    same: bool = False

    def candidates(self, axis: int, specs: Sequence[Spec], cuts: Mapping[str, tuple[int, ...]]) -> list[Candidate]:
        """The row that keeps the first input as it lies, then those of the labels."""
        out = self.labels.candidates(axis, specs, cuts)
        now = specs[0].placements[axis]
        if not (isinstance(now, Shard) and now.dim in self.dims) or not self._kept_so_far(specs[0], axis, cuts):
            return out
        sizes = self.image(specs[0], axis)
        images = tuple(Shard(self.out_dim, s) for s in sizes)
        inputs, outputs = ((now, *images), (now,)) if self.same else ((now,), images)
        return [Candidate(inputs, outputs, KEPT, sizes[0]), *out]

    def _kept_so_far(self, spec: Spec, axis: int, cuts: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether every earlier axis that splits these dims was kept: else its leaves are not what this axis splits."""
        earlier = [spec.mesh.shape[a] for a in range(axis) if any(a in spec.sharding_axes(d) for d in self.dims)]
        return len(cuts.get(KEPT, (0,))) == math.prod(earlier)

    def image(self, spec: Spec, axis: int) -> list[tuple[int, ...]]:
        """For each output, its sizes along an axis, for each piece of the earlier axes in turn."""
        axes = [a for a in range(axis + 1) if any(a in spec.sharding_axes(d) for d in self.dims)]
        outer = spec.replace((*spec.placements[: axis + 1], *(REPLICATE,) * (spec.mesh.ndim - axis - 1)))
        places = coordinates([spec.mesh.shape[a] for a in axes])
        rows = [self.count(outer.local_box(at(spec.mesh, axes, place))) for place in places]
        return [tuple(column) for column in zip(*rows, strict=True)]

    def local_args(self, call: OpCall, ins: Sequence[Spec], outs: Sequence[Spec]) -> dict[str, Varying]:
        """The operator's arguments on each piece."""
        if self.local is None:
            return {}
        fn = self.local
        names = fn(ins[0].boxes[0])
        return {name: self._argument(fn, ins[0], name) for name in names}

    def _argument(self, fn: Callable[[Box], Mapping[str, Any]], spec: Spec, name: str) -> Varying:
        return Varying(lambda coord: fn(spec.local_box(coord))[name])
