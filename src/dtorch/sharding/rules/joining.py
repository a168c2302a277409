"""Joining and splitting: pieces stay where they lie, also along the dim that grows or is cut, as far as that is sensible."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...core.mesh import DeviceMesh
from ...core.placements import REPLICATE, Partial, Placement, Shard
from ...core.spec import Box, Spec
from ..builder import Builder, Value, Varying
from ..call import OpCall
from ..call import leaves as tree_leaves
from ..labels import ANY_OP, Labels, PartialRow
from ..redistribute import redistribute
from ..rule import Rule
from .compose import letters, sharded_on
from .pieces import Kept, balanced_leaves, leaves, overlap, shards_of

_aten = torch.ops.aten
_ONE = [PartialRow((True,), ANY_OP)]

CROWDED = 1.25
"""How much more than its fair share a piece may come to hold before joining spreads the elements evenly again."""


def _rows(call: OpCall) -> list[PartialRow]:
    """All inputs partial together, unless one changes its dtype on the way."""
    same = all(s.dtype == call.outs[0].dtype for s in call.specs)
    return [PartialRow((True,) * len(call.specs), ANY_OP)] if same else []


def _skipped(spec: Spec, ndim: int) -> bool:
    """Whether ``cat`` passes over the tensor: an empty one of one dim is allowed among others of any shape."""
    return tuple(spec.shape) == (0,) and ndim != 1


def joined(call: OpCall) -> Labels:
    """``cat``: the other dims stay as they are."""
    ndim = len(call.outs[0].shape)
    dims = letters(ndim, [call.arg("dim", 0) % ndim])
    ins = [[None] if _skipped(s, ndim) else dims for s in call.specs]
    return Labels(ins, [dims], partial=_rows(call))


def join_split(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value] | None:
    """``cat`` along a split dim: cut the result where the fewest elements move, and bring each input to those cuts."""
    made = call.outs[0]
    ndim = len(made.shape)
    dim = call.arg("dim", 0) % ndim
    values = [v for v in tree_leaves((args, kwargs), Value) if not _skipped(v.spec, ndim)]
    mesh = values[0].spec.mesh
    placements = _common(values, dim)
    axes = [a for a, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim]
    if not axes:
        return None
    sizes = _cut(mesh, axes, [v.spec for v in values], dim)
    placements = _placed(mesh, placements, dim, axes, sizes)
    brought, start = [], 0
    for v in values:
        own = _placed(mesh, placements, dim, axes, _shares(sizes, start, v.spec.shape[dim]))
        brought.append(redistribute(builder, v, v.spec.replace(own)))
        start += v.spec.shape[dim]
    out = Spec.make(mesh, placements, made.shape, made.dtype, made.stride)
    return builder.local(_aten.cat.default, [brought, dim], {}, [out])


def _placed(
    mesh: DeviceMesh, placements: Sequence[Placement], dim: int, axes: Sequence[int], sizes: Sequence[int]
) -> list[Placement]:
    split = shards_of(mesh, dim, axes, sizes)
    return [split.get(a, p) for a, p in enumerate(placements)]


def _common(values: Sequence[Value], dim: int) -> list[Placement]:
    """For each axis the placement that most of the bytes have; cuts of one dim count as one, whatever their sizes."""
    mesh, out = values[0].spec.mesh, list[Placement]()
    for axis in range(mesh.ndim):
        weights: dict[Placement, int] = {}
        for v in values:
            kind = _kind(v.spec.placements[axis])
            weights[kind] = weights.get(kind, 0) + v.spec.nbytes
        best = max(weights.items(), key=lambda item: (item[1], item[0] != REPLICATE))[0]
        mixed = len(weights) > 1 or len({v.spec.dtype for v in values}) > 1
        if isinstance(best, Shard) and best.dim != dim:
            best = _sized(values, axis, best, out)
        out.append(REPLICATE if isinstance(best, Partial) and mixed else best)
    return out


def _kind(placement: Placement) -> Placement:
    return Shard(placement.dim) if isinstance(placement, Shard) else placement


def _sized(values: Sequence[Value], axis: int, kind: Shard, outer: Sequence[Placement]) -> Shard:
    """The cut of the largest value placed so, if the earlier axes lie as they do in it; else the even one."""
    leader = max((v.spec for v in values if _kind(v.spec.placements[axis]) == kind), key=lambda spec: spec.nbytes)
    earlier = [a for a in range(axis) if kind in (_kind(leader.placements[a]), _kind(outer[a]))]
    found = leader.placements[axis]
    assert isinstance(found, Shard)
    return found if all(leader.placements[a] == outer[a] for a in earlier) else kind


def _cut(mesh: DeviceMesh, axes: Sequence[int], specs: Sequence[Spec], dim: int) -> list[int]:
    """Leaf sizes of the joined dim: as some input lies, if no piece gets too crowded, else even."""
    lengths = [s.shape[dim] for s in specs]
    even = balanced_leaves(mesh, axes, sum(lengths))
    held = {i: [n for _, n in leaves(s, dim)] for i, s in enumerate(specs) if list(s.sharding_axes(dim)) == list(axes)}
    as_it_is = [sum(column) for column in zip(*held.values(), strict=True)]
    if len(held) == len(specs) and _moved(as_it_is, lengths, held) == 0:
        return as_it_is
    options = [even]
    for i, sizes in held.items():
        grown = list(sizes)
        grown[0] += sum(lengths[:i])
        grown[-1] += sum(lengths[i + 1 :])
        if max(grown) <= max(math.ceil(CROWDED * max(even)), max(sizes)):
            options.append(grown)
    return min(options, key=lambda sizes: _moved(sizes, lengths, held))


def _moved(sizes: Sequence[int], lengths: Sequence[int], held: dict[int, list[int]]) -> int:
    """Elements (per row) that change their leaf under these cuts of the joined dim."""
    moved = 0
    for i, own in held.items():
        wanted = _shares(sizes, sum(lengths[:i]), lengths[i])
        at = to = 0
        for n, share in zip(own, wanted, strict=True):
            moved += n - overlap((at, n), to, to + share)
            at, to = at + n, to + share
    return moved


def _shares(sizes: Sequence[int], start: int, length: int) -> list[int]:
    """How much of the run ``[start, start + length)`` lies in each leaf."""
    out, at = [], 0
    for n in sizes:
        out.append(overlap((at, n), start, start + length))
        at += n
    return out


def stacked(call: OpCall) -> Labels:
    """``stack``: the new dim is whole."""
    ndim = len(call.specs[0].shape)
    dim = call.arg("dim", 0) % (ndim + 1)
    dims = letters(ndim)
    return Labels([dims] * len(call.specs), [[*dims[:dim], None, *dims[dim:]]], partial=_rows(call))


@dataclass(frozen=True)
class Parts(Kept):
    """``split`` and ``split_with_sizes``: each part of a split dim is split, and locally a part of the piece."""

    def steps(self, builder: Builder, call: OpCall, args: Any, kwargs: Any, outs: Sequence[Spec]) -> list[Value] | None:
        """Split the piece by its own sizes."""
        x = args[0]
        if not sharded_on(x.spec, [self.out_dim]):
            return None
        sizes = Varying(lambda coord: list(self.count(x.spec.local_box(coord))))
        return builder.local(_aten.split_with_sizes.default, [x, sizes, self.out_dim], {}, outs)


def parts(call: OpCall) -> Parts:
    """``split`` into parts of one size (the last may be shorter) or of given sizes."""
    shape = call.specs[0].shape
    dim = call.arg("dim", 0) % len(shape)
    dims = letters(len(shape), [dim])
    sizes = [made.shape[dim] for made in call.outs]
    bounds = [(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]

    def count(box: Box) -> list[int]:
        return [overlap((box[0][dim], box[1][dim]), low, high) for low, high in bounds]

    return Parts(Labels([dims], [dims] * len(call.outs), partial=_ONE), (dim,), dim, count)


def unbound(call: OpCall) -> Labels:
    """``unbind``: the other dims stay as they are."""
    ndim = len(call.specs[0].shape)
    dim = call.arg("dim", 0) % ndim
    dims = letters(ndim, [dim])
    return Labels([dims], [dims[:dim] + dims[dim + 1 :]] * len(call.outs), partial=_ONE)


def repeated(call: OpCall) -> Labels:
    """``repeat``: dims repeated once stay as they are."""
    old, repeats = call.specs[0].shape, call.arg("repeats")
    skip = len(repeats) - len(old)
    dims = letters(len(old), [d for d in range(len(old)) if repeats[skip + d] != 1])
    return Labels([dims], [[*[None] * skip, *dims]], partial=_ONE)


TABLE = {
    "cat": Rule(joined, join_split),
    "stack": Rule(stacked),
    "split": Rule(parts),
    "split_with_sizes": Rule(parts),
    "unbind": Rule(unbound),
    "unbind_copy": Rule(unbound),
    "repeat": Rule(repeated),
}
