"""Writing a part back into a tensor, and the backward of taking one: the part lies where the whole does, and nothing moves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...core.placements import Shard
from ...core.spec import Spec
from ..builder import Builder, Value, Varying
from ..call import OpCall
from ..labels import ANY_OP, Candidate, Labels, PartialRow
from ..rule import Rule
from .compose import letters, sharded_on
from .pieces import KEPT, Kept, balanced_leaves, leaf_number, leaves, shards_of, snapped
from .slicing import Positions, diagonal_of, positions, row_of

_aten = torch.ops.aten
_ONE = [PartialRow((True,), ANY_OP)]
_BOTH = [PartialRow((True, True), ANY_OP)]


def slice_written(call: OpCall) -> Kept:
    """``slice_scatter``: the source lies as the slice would."""
    ndim = len(call.specs[0].shape)
    taken = positions(call, call.specs[0].shape, ndim)
    dims = letters(ndim, [taken.dim])
    labels = Labels([dims, dims], [dims], partial=_same_dtype(call))
    return Kept(
        labels,
        (taken.dim,),
        taken.dim,
        lambda box: [taken.inside(box[0][taken.dim], box[1][taken.dim])[1]],
        taken.local,
        same=True,
    )


def diagonal_written(call: OpCall) -> Kept:
    """``diagonal_scatter``: the source lies as the diagonal would."""
    ndim = len(call.specs[0].shape)
    line = diagonal_of(call, ndim)
    whole = letters(ndim, [line.dim1, line.dim2])
    labels = Labels([whole, [*line.others(), None]], [whole], partial=_same_dtype(call))
    return Kept(labels, (line.dim1, line.dim2), ndim - 2, lambda box: [line.inside(box)], line.local, same=True)


def row_written(call: OpCall) -> Labels:
    """``select_scatter``: the other dims stay as they are."""
    ndim = len(call.specs[0].shape)
    dim = call.arg("dim") % ndim
    dims = letters(ndim, [dim])
    return Labels([dims, dims[:dim] + dims[dim + 1 :]], [dims], partial=_same_dtype(call))


def write_owned(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value] | None:
    """``select_scatter`` on a split dim: a slice of one row, which the other pieces have nothing of."""
    x, source = args[0], args[1]
    dim, index = row_of(call)
    if not sharded_on(x.spec, [dim]):
        return None
    row = builder.op(_aten.unsqueeze.default, source, dim)
    return [builder.op(_aten.slice_scatter.default, x, row, dim, index, index + 1)]


def _same_dtype(call: OpCall) -> list[PartialRow]:
    return _BOTH if call.specs[0].dtype == call.specs[1].dtype else []


@dataclass(frozen=True)
class Spread:
    """The backward of a slice or a diagonal: a split dim of the gradient gives a split dim of the result.

    Attributes:
        labels: what holds for all other dims.
        dim: the gradient's dim.
        onto: where its elements go.
        local: the operator's own arguments, by schema name, given where a piece of the result begins along
            ``onto.dim`` and (number of the first, count) of the elements it holds.
    """

    labels: Labels
    dim: int
    onto: Positions
    local: Callable[[int, tuple[int, int]], Mapping[str, int]]
    length: int

    def candidates(self, axis: int, specs: Sequence[Spec], cuts: Mapping[str, tuple[int, ...]]) -> list[Candidate]:
        """The row that keeps the gradient as it lies, then those of the labels."""
        out = self.labels.candidates(axis, specs, cuts)
        now, mesh = specs[0].placements[axis], specs[0].mesh
        axes = specs[0].sharding_axes(self.dim)
        if (
            isinstance(now, Shard)
            and now.dim == self.dim
            and len(cuts.get(KEPT, (0,))) == math.prod(mesh.shape[a] for a in axes if a < axis)
        ):
            wanted = balanced_leaves(mesh, axes, self.length)
            sizes = snapped(leaves(specs[0], self.dim), self.onto.first, self.onto.step, self.length, wanted)
            placed = shards_of(mesh, self.onto.dim, axes, sizes)[axis]
            assert placed.sizes is not None
            out.insert(0, Candidate((now,), (placed,), KEPT, placed.sizes))
        return out

    def local_args(self, call: OpCall, ins: Sequence[Spec], outs: Sequence[Spec]) -> dict[str, Varying]:
        """The local shape of the result, and where in it the gradient goes."""
        held = leaves(ins[0], self.dim)

        def arguments(coord: tuple[int, ...]) -> dict[str, Any]:
            offset, size = outs[0].local_box(coord)
            segment = held[leaf_number(ins[0], self.dim, coord)]
            return {"input_sizes": list(size), **self.local(offset[self.onto.dim], segment)}

        names = arguments((0,) * ins[0].mesh.ndim)
        return {name: _named(arguments, name) for name in names}


def _named(arguments: Callable[[tuple[int, ...]], Mapping[str, Any]], name: str) -> Varying:
    return Varying(lambda coord: arguments(coord)[name])


def slice_spread(call: OpCall) -> Spread:
    """``slice_backward``."""
    shape = call.arg("input_sizes")
    onto = positions(call, shape, len(shape))
    dims = letters(len(shape), [onto.dim])

    def local(offset: int, held: tuple[int, int]) -> dict[str, int]:
        start = onto.first + held[0] * onto.step - offset if held[1] else 0
        return {"start": start, "end": start + (held[1] - 1) * onto.step + 1 if held[1] else 0}

    return Spread(Labels([dims], [dims], partial=_ONE), onto.dim, onto, local, shape[onto.dim])


def diagonal_spread(call: OpCall) -> Spread:
    """``diagonal_backward``: the result is split along ``dim1``."""
    shape = call.arg("input_sizes")
    line = diagonal_of(call, len(shape))
    count = call.specs[0].shape[-1]
    onto = Positions(line.dim1, max(-line.offset, 0), 1, count)
    labels = Labels([[*line.others(), None]], [letters(len(shape), [line.dim1, line.dim2])], partial=_ONE)
    return Spread(labels, len(shape) - 2, onto, lambda offset, held: {"offset": line.offset + offset}, shape[line.dim1])


def embedded(call: OpCall) -> Labels:
    """``diag_embed``: the other dims stay as they are."""
    ndim = len(call.outs[0].shape)
    line = diagonal_of(call, ndim)
    return Labels([[*line.others(), None]], [letters(ndim, [line.dim1, line.dim2])], partial=_ONE)


def embed_split(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value] | None:
    """``diag_embed`` of a split diagonal, which is what the backward of ``diagonal`` does."""
    x, made = args[0], call.outs[0]
    if not sharded_on(x.spec, [len(x.spec.shape) - 1]):
        return None
    line = diagonal_of(call, len(made.shape))
    return [builder.op(_aten.diagonal_backward.default, x, list(made.shape), line.offset, line.dim1, line.dim2)]


def row_spread(call: OpCall) -> Labels:
    """``select_backward``: the other dims stay as they are."""
    shape = call.arg("input_sizes")
    dim = call.arg("dim") % len(shape)
    dims = letters(len(shape), [dim])
    return Labels([dims[:dim] + dims[dim + 1 :]], [dims], partial=_ONE, shape_args={"input_sizes": 0})


TABLE = {
    "slice_scatter": Rule(slice_written),
    "select_scatter": Rule(row_written, write_owned),
    "diagonal_scatter": Rule(diagonal_written),
    "slice_backward": Rule(slice_spread),
    "select_backward": Rule(row_spread),
    "diagonal_backward": Rule(diagonal_spread),
    "diag_embed": Rule(embedded, embed_split),
}
