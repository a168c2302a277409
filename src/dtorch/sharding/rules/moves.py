"""Assembling pieces from arbitrary boxes of another tensor, in one exchange: flip, roll, and windows over cuts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...core.mesh import coordinates
from ...core.placements import Shard
from ...core.spec import Box, Spec
from ..builder import Builder, Value, Varying
from ..call import OpCall
from ..labels import ANY_OP, Labels, PartialRow
from ..rule import Rule
from .compose import letters, sharded_on
from .leafwise import laid, placed
from .pieces import leaf_number, leaves, shards_of

_aten = torch.ops.aten
_MOVES = [PartialRow((True,), ANY_OP)]
Run = tuple[int, int, int]
"""(start in the source, start in the piece, length) along one dim."""
RunsOf = Callable[[int, int, int], Sequence[Run]]
"""``runs(dim, offset, size)``: where a piece's part of a dim comes from; at its own place where it is not asked for."""


def assembled(builder: Builder, value: Value, target: Spec, runs: Callable[[Box], Sequence[Sequence[Run]]]) -> Value:
    """A value of the target's spec whose pieces are made of boxes of another value on the same mesh.

    Args:
        target: partial where, and only where, the value is.
        runs: for each dim of a target piece, given its box, the runs of the source it consists of.
    """
    source = value.spec
    held = list(coordinates(source.piece_grid))
    parts, moved = [], 0
    for coord, box in zip(coordinates(target.piece_grid), target.boxes, strict=True):
        place = dict(zip(target.axes, coord, strict=True))
        own = source.piece_of([place.get(a, 0) for a in range(source.mesh.ndim)])
        row = []
        for number, at in enumerate(held):
            if all(place[a] == c for a, c in zip(source.axes, at, strict=True) if a in source.partial_axes):
                row += _parts(number, source.boxes[number], runs(box))
        parts.append(row)
        moved += sum(math.prod(part[3]) for part in row if part[0] != own)
    copies = source.mesh.size() // max(len(target.boxes), 1)
    names = "+".join(source.mesh.axis_names()[a] for a in target.axes if isinstance(target.placements[a], Shard))
    shapes = [list(size) for _, size in target.boxes]
    return builder.exchange(value, target, parts, shapes, "exchange", names, moved * source.dtype.itemsize * copies)


def _parts(number: int, held: Box, runs: Sequence[Sequence[Run]]) -> list[tuple[int, list[int], list[int], list[int]]]:
    """The parts that one source piece gives to a target piece."""
    rows = []
    for offset, size, dim_runs in zip(*held, runs, strict=True):
        found = []
        for start, into, length in dim_runs:
            low, high = max(start, offset), min(start + length, offset + size)
            if high > low:
                found.append((low - offset, into + low - start, high - low))
        rows.append(found)
    return [(number, [p[0] for p in pick], [p[1] for p in pick], [p[2] for p in pick]) for pick in itertools.product(*rows)]


def shifted_dims(call: OpCall, name: str) -> list[int]:
    """The non-negative dims that a flip or roll names."""
    ndim = len(call.specs[0].shape)
    return [d % ndim for d in call.arg(name)] if ndim else []


def flipped(call: OpCall) -> Labels:
    """``flip``: the other dims stay as they are."""
    dims = letters(len(call.specs[0].shape), shifted_dims(call, "dims"))
    return Labels([dims], [dims], partial=_MOVES)


def flip_split(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value] | None:
    """``flip`` on split dims: each piece fetches its mirror image, then turns it."""
    x, dims = args[0], shifted_dims(call, "dims")
    if not sharded_on(x.spec, dims):
        return None
    shape = x.spec.shape

    def runs(box: Box) -> list[list[Run]]:
        return [[(shape[d] - o - n if d in dims else o, 0, n)] for d, (o, n) in enumerate(zip(*box, strict=True))]

    mirrored = assembled(builder, x, x.spec, runs)
    out = builder.local(_aten.flip.default, [mirrored, dims], {}, [placed(x, call.outs[0])])[0]
    return [out]


def rolled(call: OpCall) -> Labels | None:
    """``roll``: the other dims stay as they are; without dims it rolls the flattened tensor, which must be whole."""
    ndim = len(call.specs[0].shape)
    dims = letters(ndim, shifted_dims(call, "dims") or range(ndim))
    return Labels([dims], [dims], partial=_MOVES)


def roll_split(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value] | None:
    """``roll`` of split dims: each piece fetches what rolls into it."""
    x, dims, shape = args[0], shifted_dims(call, "dims"), args[0].spec.shape
    if not sharded_on(x.spec, dims):
        return None
    shifts = [0] * len(shape)
    for d, shift in zip(dims, call.arg("shifts"), strict=True):
        shifts[d] += shift

    def runs(box: Box) -> list[list[Run]]:
        return [_around(o - s, n, whole) for o, n, s, whole in zip(*box, shifts, shape, strict=True)]

    out = assembled(builder, x, placed(x, call.outs[0]), runs)
    # An exchange keeps the order of strides of its source, which the operator may not.
    return [out if x.spec.meta.is_contiguous() else laid(builder, out, call)]


def _around(start: int, length: int, whole: int) -> list[Run]:
    """The runs of a dim of ``whole`` elements that make ``length`` elements from ``start`` on, wrapping at the end."""
    if not length:
        return []
    start %= whole
    first = min(length, whole - start)
    return [(start, 0, first), (0, first, length - first)]


def windowed(call: OpCall) -> Labels:
    """``unfold``: the other dims stay as they are."""
    ndim = len(call.specs[0].shape)
    dims = letters(ndim, [call.arg("dimension") % ndim] if ndim else [])
    return Labels([dims], [[*dims, None]], partial=_MOVES)


def window_split(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value] | None:
    """``unfold`` of a split dim: each piece fetches what its own windows lack, which is nothing where cuts meet windows."""
    x, size, step = args[0], call.arg("size"), call.arg("step")
    ndim = len(x.spec.shape)
    dim = call.arg("dimension") % ndim if ndim else 0
    if not ndim or not size or not sharded_on(x.spec, [dim]):
        return None
    total = call.outs[0].shape[dim]
    axes, mesh, held = x.spec.sharding_axes(dim), x.spec.mesh, leaves(x.spec, dim)
    # A window belongs to the piece where it begins.
    begins = [min(-(-start // step), total) for start, _ in held] + [total]
    counts = [b - a for a, b in itertools.pairwise(begins)]
    # A piece without windows still needs room for one: the operator refuses less.
    lengths = [(n - 1) * step + size if n else size for n in counts]
    placed = shards_of(mesh, dim, axes, lengths)
    shape = (*x.spec.shape[:dim], sum(lengths), *x.spec.shape[dim + 1 :])
    wide = Spec.make(mesh, [placed.get(a, p) for a, p in enumerate(x.spec.placements)], shape, x.spec.dtype)

    def runs(box: Box) -> list[list[Run]]:
        leaf = leaves(wide, dim).index((box[0][dim], box[1][dim]))
        own = [(begins[leaf] * step, 0, lengths[leaf])] if counts[leaf] else []
        return [own if d == dim else [(o, 0, n)] for d, (o, n) in enumerate(zip(*box, strict=True))]

    value = assembled(builder, x, wide, runs)
    return [_windows(builder, call, value, dim, axes, counts)]


def _windows(builder: Builder, call: OpCall, value: Value, dim: int, axes: Sequence[int], counts: Sequence[int]) -> Value:
    """The windows of each piece, as many as belong to it."""
    spec, mesh = value.spec, value.spec.mesh
    size, step = call.arg("size"), call.arg("step")
    room = [max(n, 1) for n in counts]
    placed = shards_of(mesh, dim, axes, room)
    shape = (*spec.shape[:dim], sum(room), *spec.shape[dim + 1 :], size)
    loose = Spec.make(mesh, [placed.get(a, p) for a, p in enumerate(spec.placements)], shape, spec.dtype)
    out = builder.local(_aten.unfold.default, [value, dim, size, step], {}, [loose])[0]
    kept = shards_of(mesh, dim, axes, counts)
    made = call.outs[0]
    target = Spec.make(mesh, [kept.get(a, p) for a, p in enumerate(spec.placements)], made.shape, made.dtype, made.stride)
    end = Varying(lambda coord: counts[leaf_number(spec, dim, coord)])
    return builder.local(_aten.slice.Tensor, [out, dim, 0, end], {}, [target])[0]


def unwindowed(call: OpCall) -> Labels:
    """``unfold_backward``: the other dims stay as they are."""
    ndim = len(call.arg("input_sizes"))
    dims = letters(ndim, [call.arg("dim") % ndim] if ndim else [])
    return Labels([[*dims, None]], [dims], partial=[PartialRow((True,))], shape_args={"input_sizes": 0})


TABLE = {
    "flip": Rule(flipped, flip_split),
    "roll": Rule(rolled, roll_split),
    "unfold": Rule(windowed, window_split),
    "unfold_backward": Rule(unwindowed),
}
