"""``Spec``: everything the planner knows of a global tensor. Equal specs are one object, so they hash by identity."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import cached_property
from weakref import WeakValueDictionary

import torch

from .errors import PlacementError, four_parts
from .mesh import DeviceMesh, coordinates
from .placements import REPLICATE, Partial, Placement, Placements, Replicate, Shard, balanced

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""A rectangular part of a tensor: (offset per dim, size per dim), in elements."""

_interned: WeakValueDictionary[tuple, Spec] = WeakValueDictionary()


class Spec:
    """Mesh, placements, global shape, global stride and dtype of a tensor; interned and immutable.

    A *piece* is a distinct local tensor. Devices that differ only along replicated axes share one, so pieces are
    numbered row-major over ``axes``, the mesh axes along which the local tensors differ.
    """

    __slots__ = ("__dict__", "__weakref__", "axes", "device", "dtype", "mesh", "placements", "shape", "stride")

    mesh: DeviceMesh
    placements: Placements
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    axes: tuple[int, ...]

    @staticmethod
    def make(
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        shape: Sequence[int],
        dtype: torch.dtype,
        stride: Sequence[int] | None = None,
    ) -> Spec:
        """The one spec with these properties; placements are checked and put in canonical form.

        Args:
            placements: one per mesh axis; negative dims count from the end.
            stride: global stride in elements; contiguous when omitted.

        Raises:
            PlacementError: wrong number of placements, dim out of range, or sizes that do not add up.
        """
        shape = torch.Size(shape)
        full_stride = contiguous_stride(shape) if stride is None else tuple(stride)
        key = (mesh, tuple(placements), shape, full_stride, dtype)
        spec = _interned.get(key)
        if spec is None:
            canonical = (mesh, canonical_placements(mesh, key[1], shape), shape, full_stride, dtype)
            spec = _interned.get(canonical) or _build(canonical)
            _interned[canonical] = spec
            _interned[key] = spec
        return spec

    def replace(self, placements: Sequence[Placement] | None = None, mesh: DeviceMesh | None = None) -> Spec:
        """The same tensor placed otherwise."""
        return Spec.make(
            mesh or self.mesh, self.placements if placements is None else placements, self.shape, self.dtype, self.stride
        )

    @cached_property
    def meta(self) -> torch.Tensor:
        """A meta tensor of the global shape, stride and dtype, for shape inference."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Dims from the largest stride to the smallest; row-major for an expanded tensor, which has no order of its own."""
        dims = tuple(range(len(self.shape)))
        expanded = any(step == 0 and n > 1 for step, n in zip(self.stride, self.shape, strict=True))
        return dims if expanded else tuple(sorted(dims, key=lambda d: -self.stride[d]))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, once."""
        return math.prod(self.shape) * self.dtype.itemsize

    @cached_property
    def partial_axes(self) -> tuple[int, ...]:
        """Mesh axes (of size above 1) on which the tensor is an unreduced partial."""
        return tuple(a for a in self.axes if isinstance(self.placements[a], Partial))

    @cached_property
    def piece_grid(self) -> tuple[int, ...]:
        """Number of pieces along each of ``axes``."""
        return tuple(self.mesh.shape[a] for a in self.axes)

    def sharding_axes(self, dim: int) -> tuple[int, ...]:
        """Mesh axes that split a tensor dim, outer first."""
        return tuple(a for a, p in enumerate(self.placements) if isinstance(p, Shard) and p.dim == dim)

    def sizes_on(self, axis: int) -> tuple[int, ...]:
        """Local sizes along a sharding axis, for each piece of the earlier axes on the same dim in turn."""
        placement = self.placements[axis]
        assert isinstance(placement, Shard)
        segments = _segments(self.mesh, self.placements, placement.dim, self.shape[placement.dim], axis)
        return tuple(size for _, size in segments)

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """The box of each piece, in piece order. Pieces of a partial tensor along its partial axes share a box."""
        per_dim = {d: _dim_segments(self, d) for d in range(len(self.shape)) if self.sharding_axes(d)}
        out = []
        for coord in coordinates(self.piece_grid):
            at = dict(zip(self.axes, coord, strict=True))
            offset, size = [0] * len(self.shape), list(self.shape)
            for d, segments in per_dim.items():
                index = 0
                for a in self.sharding_axes(d):
                    index = index * self.mesh.shape[a] + at.get(a, 0)
                offset[d], size[d] = segments[index]
            out.append((tuple(offset), tuple(size)))
        return tuple(out)

    def piece_of(self, coord: Sequence[int]) -> int:
        """Number of the piece that the device at a mesh coordinate holds."""
        index = 0
        for a in self.axes:
            index = index * self.mesh.shape[a] + coord[a]
        return index

    def local_box(self, coord: Sequence[int]) -> Box:
        """Offset and size of the part that the device at a mesh coordinate holds."""
        return self.boxes[self.piece_of(coord)]

    def __repr__(self) -> str:
        return f"Spec({tuple(self.shape)}, {str(self.dtype)[6:]}, {self.mesh!r}, {self.placements!r})"


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major stride of a shape, in elements."""
    out: list[int] = []
    step = 1
    for n in reversed(shape):
        out.append(step)
        step *= max(n, 1)
    return tuple(reversed(out))


def canonical_placements(mesh: DeviceMesh, placements: Placements, shape: Sequence[int]) -> Placements:
    """Check placements against mesh and shape; non-negative dims, and no sizes where the split is the balanced one.

    Raises:
        PlacementError: see ``Spec.make``.
    """
    if len(placements) != mesh.ndim:
        raise PlacementError(
            four_parts(
                f"placements={placements!r} on {mesh!r}",
                "one placement per mesh axis",
                "argument placements",
                f"give {mesh.ndim} placements",
            )
        )
    done: list[Placement] = []
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            placement = _canonical_shard(mesh, done, placement, shape, axis)
        elif not isinstance(placement, Replicate | Partial):
            raise PlacementError(
                four_parts(
                    f"placement {placement!r}",
                    "a placement is Shard, Replicate or Partial",
                    f"argument placements, axis {mesh.axis_names()[axis]!r}",
                    "use dtorch.Shard(dim), dtorch.Replicate() or dtorch.Partial()",
                )
            )
        done.append(placement)
    return tuple(done)


def _canonical_shard(mesh: DeviceMesh, outer: list[Placement], shard: Shard, shape: Sequence[int], axis: int) -> Shard:
    where = f"argument placements, axis {mesh.axis_names()[axis]!r}"
    ndim = len(shape)
    if not -ndim <= shard.dim < ndim:
        raise PlacementError(
            four_parts(
                f"{shard!r} of a tensor of shape {tuple(shape)}",
                f"a shard dim lies in [{-ndim}, {ndim - 1}]",
                where,
                "name a dim that the tensor has, or Replicate()",
            )
        )
    dim = shard.dim % ndim
    if shard.sizes is None:
        return Shard(dim) if dim != shard.dim else shard
    k = mesh.shape[axis]
    lengths = [n for _, n in _segments(mesh, tuple(outer), dim, shape[dim], axis - 1)]
    if not _cover(shard.sizes, k, lengths):
        raise PlacementError(
            four_parts(
                f"{shard!r} of a tensor of shape {tuple(shape)}",
                f"sizes are {k * len(lengths)} non-negative lengths that add up to {lengths}",
                where,
                "give sizes that cover the dim",
            )
        )
    natural = tuple(s for n in lengths for s in balanced(n, k))
    return Shard(dim) if shard.sizes == natural else Shard(dim, shard.sizes)


def _cover(sizes: Sequence[int], k: int, lengths: Sequence[int]) -> bool:
    """Whether each k sizes in turn add up to a length."""
    sums = [sum(sizes[i : i + k]) for i in range(0, len(sizes), k)]
    return len(sizes) == k * len(lengths) and sums == list(lengths) and min(sizes) >= 0


def fitting_placements(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], given: Collection[int] = ()
) -> Placements:
    """The placements, without explicit sizes where these do not fit the mesh and the placements before them.

    Args:
        given: mesh axes whose placement is left as it is.
    """
    done: list[Placement] = []
    for axis, p in enumerate(placements):
        if isinstance(p, Shard) and p.dim < 0:
            p = Shard(p.dim + len(shape), p.sizes)
        if isinstance(p, Shard) and p.sizes is not None and axis not in given and 0 <= p.dim < len(shape):
            lengths = [n for _, n in _segments(mesh, tuple(done), p.dim, shape[p.dim], axis - 1)]
            p = p if _cover(p.sizes, mesh.shape[axis], lengths) else Shard(p.dim)
        done.append(p)
    return tuple(done)


def _dim_segments(spec: Spec, dim: int) -> list[tuple[int, int]]:
    return _segments(spec.mesh, spec.placements, dim, spec.shape[dim], spec.mesh.ndim - 1)


def _segments(mesh: DeviceMesh, placements: Placements, dim: int, n: int, last_axis: int) -> list[tuple[int, int]]:
    """(start, size) of each part of a dim of length n after the sharding axes up to ``last_axis``, outer axis first."""
    out = [(0, n)]
    for axis, placement in enumerate(placements[: last_axis + 1]):
        if not (isinstance(placement, Shard) and placement.dim == dim):
            continue
        k = mesh.shape[axis]
        split: list[tuple[int, int]] = []
        for i, (start, length) in enumerate(out):
            sizes = placement.sizes[i * k : (i + 1) * k] if placement.sizes else balanced(length, k)
            for size in sizes:
                split.append((start, size))
                start += size
        out = split
    return out


def _build(key: tuple) -> Spec:
    spec = object.__new__(Spec)
    spec.mesh, spec.placements, spec.shape, spec.stride, spec.dtype = key
    spec.device = torch.device("cpu") if spec.mesh.device_type == "cpu" else torch.device(spec.mesh.device_type, 0)
    spec.axes = tuple(a for a, p in enumerate(spec.placements) if p != REPLICATE and spec.mesh.shape[a] > 1)
    return spec
