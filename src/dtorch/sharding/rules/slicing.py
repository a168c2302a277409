"""Taking part of a tensor: what is split stays split, and nothing moves.

A slice of a split dim is split over the same axes, with explicit and possibly empty pieces; locally it is a slice of the
piece, so it aliases. An element of a split dim is one piece's, and is sent to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...core.placements import REPLICATE, Shard
from ...core.spec import Box
from ..builder import Builder, Value
from ..call import OpCall
from ..labels import ANY_OP, Labels, PartialRow
from ..redistribute import redistribute
from ..rule import Rule
from .compose import letters, sharded_on
from .pieces import Kept

_aten = torch.ops.aten
_ONE = [PartialRow((True,), ANY_OP)]


@dataclass(frozen=True)
class Positions:
    """Positions ``first + i * step`` for i below ``count``, on a dim."""

    dim: int
    first: int
    step: int
    count: int

    def inside(self, low: int, size: int) -> tuple[int, int]:
        """(number of the first, count) of the positions in ``[low, low + size)``."""
        begin = self._before(low)
        return begin, self._before(low + size) - begin

    def _before(self, end: int) -> int:
        return min(max(-((self.first - end) // self.step), 0), self.count)

    def local(self, box: Box) -> dict[str, int]:
        """The slice of a piece that holds its share of the positions."""
        begin, count = self.inside(box[0][self.dim], box[1][self.dim])
        start = self.first + begin * self.step - box[0][self.dim] if count else 0
        return {"start": start, "end": start + (count - 1) * self.step + 1 if count else 0}


def positions(call: OpCall, shape: Sequence[int], ndim: int) -> Positions:
    """The positions that a call's ``dim``, ``start``, ``end`` and ``step`` name on a tensor of this shape."""
    dim = call.arg("dim", 0) % ndim
    start, end, step = slice(call.arg("start"), call.arg("end"), call.arg("step", 1)).indices(shape[dim])
    return Positions(dim, start, step, len(range(start, end, step)))


def sliced(call: OpCall) -> Kept:
    """``slice``: any step."""
    ndim = len(call.specs[0].shape)
    taken = positions(call, call.specs[0].shape, ndim)
    dims = letters(ndim, [taken.dim])
    labels = Labels([dims], [dims], partial=_ONE)
    return Kept(labels, (taken.dim,), taken.dim, lambda box: [taken.inside(box[0][taken.dim], box[1][taken.dim])[1]], taken.local)


def selected(call: OpCall) -> Labels:
    """``select``: the other dims stay as they are."""
    ndim = len(call.specs[0].shape)
    dim = call.arg("dim") % ndim
    dims = letters(ndim, [dim])
    return Labels([dims], [dims[:dim] + dims[dim + 1 :]], partial=_ONE)


def select_owned(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value] | None:
    """``select`` on a split dim: the owner's row, sent to all."""
    x, (dim, index) = args[0], row_of(call)
    if not sharded_on(x.spec, [dim]):
        return None
    row = builder.op(_aten.slice.Tensor, x, dim, index, index + 1)
    placements = [REPLICATE if isinstance(p, Shard) and p.dim == dim else p for p in row.spec.placements]
    row = redistribute(builder, row, row.spec.replace(placements))
    return [builder.op(_aten.select.int, row, dim, 0)]


def row_of(call: OpCall) -> tuple[int, int]:
    """The non-negative dim and index of a select."""
    shape = call.specs[0].shape
    dim = call.arg("dim") % len(shape)
    return dim, call.arg("index") % shape[dim]


@dataclass(frozen=True)
class Diagonal:
    """The diagonal ``offset`` of the dims ``dim1`` and ``dim2`` of a tensor of n dims."""

    offset: int
    dim1: int
    dim2: int
    ndim: int

    def others(self) -> list[str | None]:
        """Labels of the dims that stay, in order."""
        return [c for d, c in enumerate(letters(self.ndim)) if d not in (self.dim1, self.dim2)]

    def inside(self, box: Box) -> int:
        """How many of its elements lie in a box."""
        row, column = box[0][self.dim1] - max(-self.offset, 0), box[0][self.dim2] - max(self.offset, 0)
        return max(0, min(row + box[1][self.dim1], column + box[1][self.dim2]) - max(row, column, 0))

    def local(self, box: Box) -> dict[str, int]:
        """The offset of the same diagonal on a piece."""
        return {"offset": self.offset + box[0][self.dim1] - box[0][self.dim2]}


def diagonal_of(call: OpCall, ndim: int) -> Diagonal:
    """The diagonal that a call names on a tensor of n dims."""
    return Diagonal(call.arg("offset", 0), call.arg("dim1", 0) % ndim, call.arg("dim2", 1) % ndim, ndim)


def diagonal(call: OpCall) -> Kept:
    """``diagonal``: the elements of a piece are the diagonal of a piece, at another offset."""
    ndim = len(call.specs[0].shape)
    line = diagonal_of(call, ndim)
    labels = Labels([letters(ndim, [line.dim1, line.dim2])], [[*line.others(), None]], partial=_ONE)
    return Kept(labels, (line.dim1, line.dim2), ndim - 2, lambda box: [line.inside(box)], line.local)


TABLE = {
    "slice": Rule(sliced),
    "select": Rule(selected, select_owned),
    "diagonal": Rule(diagonal),
}
