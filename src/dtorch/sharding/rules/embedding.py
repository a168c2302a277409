"""Embedding: rows of a table by number. A table split by rows is looked up piece by piece, a partial sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...core.placements import REPLICATE, Partial, Shard
from ...core.spec import Spec
from ..builder import Builder, Value, Varying
from ..call import OpCall
from ..labels import Candidate, Labels, PartialRow
from ..redistribute import redistribute
from ..rule import Rule
from .compose import has_empty_piece, letters, named, settled, sharded_on, tensor_names
from .lookup import checked, column, located, varying

_aten = torch.ops.aten


class RowsOf(Labels):
    """Lookup in a table: label ``V`` numbers its rows, ``F`` its features."""

    def candidates(self, axis: int, specs: Sequence[Spec], cuts: Mapping[str, tuple[int, ...]]) -> list[Candidate]:
        """A table split by rows stays split: a vocabulary is too large to gather, however few bytes that might move."""
        every = super().candidates(axis, specs, cuts)
        held = specs[0].placements[axis]
        split = [c for c in every if c.label == "V"] if isinstance(held, Shard) and held.dim == 0 else []
        return split or every

    def steps(self, builder: Builder, call: OpCall, args: Any, kwargs: Any, outs: Sequence[Spec]) -> list[Value] | None:
        """Each piece looks up the rows it holds; the other rows of its result are zero."""
        given = named(call, args, kwargs)
        weight, numbers = given["weight"], given["indices"]
        if not sharded_on(weight.spec, [0]):
            return None
        checked(builder, numbers, weight.spec.shape[0], "index out of range in self")
        found = located(builder, numbers, weight.spec, 0)
        rows = builder.local(_aten.embedding.default, [weight, found.place], {}, outs)[0]
        outside = column(builder, found.outside, len(numbers.spec.shape))
        return builder.local(_aten.masked_fill_.Scalar, [rows, outside, 0], {}, outs)


def embedding(call: OpCall) -> Labels:
    """Rows, features, and the dims of the numbers may be sharded; linear in the table."""
    numbers = letters(len(call.arg("indices").shape))
    table = ["V", "F"]
    return RowsOf([table, numbers], [[*numbers, "F"]], {"V": "sum"}, [PartialRow((True, False))], nonempty=frozenset("V"))


def dense_backward(call: OpCall) -> Labels:
    """The table's gradient: a partial sum over sharded numbers, unless it is scaled by how often each number occurs."""
    ndim = len(call.arg("indices").shape)
    scaled = call.arg("scale_grad_by_freq")
    numbers = letters(ndim, range(ndim) if scaled else ())
    reduce = {c: "sum" for c in numbers if c is not None}
    return Labels([[*numbers, "F"], numbers], [[None, "F"]], reduce, [PartialRow((True, False))])


def can_split(grad: Spec, numbers: Spec, table: Spec) -> bool:
    """Whether ``split_gradient`` applies: every piece holds rows, and sees all numbers and their gradients."""
    seen = all(numbers.placements[a] == REPLICATE and not isinstance(grad.placements[a], Shard) for a in table.sharding_axes(0))
    return seen and not has_empty_piece(table, [0])


def split_gradient(builder: Builder, grad: Value, numbers: Value, table: Spec, padding: int) -> Value:
    """The gradient of a table split by rows, split alike: each piece adds up the rows it holds.

    ``numbers`` and ``grad`` (numbers' dims, features) may be split over other axes, which leaves a partial sum.
    """
    rows, last = table.sharding_axes(0), len(numbers.spec.shape)
    grad = settled(builder, grad)
    tokens = [p if isinstance(p, Shard) and p.dim < last else None for p in grad.spec.placements]
    numbers = redistribute(builder, numbers, numbers.spec.replace([p or REPLICATE for p in tokens]))
    features = [Shard(last, p.sizes) if isinstance(p, Shard) and p.dim == 1 else REPLICATE for p in table.placements]
    grad = redistribute(builder, grad, grad.spec.replace([p or f for p, f in zip(tokens, features, strict=True)]))
    found = located(builder, numbers, table, 0)
    outside = column(builder, found.outside, last)
    held = varying(grad.spec, rows)
    grad = builder.local(_aten.masked_fill.Scalar, [grad, outside, 0], {}, [held])[0]
    placements = [
        Partial() if t is not None else p if isinstance(p, Shard) else REPLICATE
        for t, p in zip(tokens, table.placements, strict=True)
    ]
    out = Spec.make(table.mesh, placements, table.shape, grad.spec.dtype)
    count = Varying(lambda coord: table.local_box(coord)[1][0])
    own = Varying(lambda coord: _local_number(table, coord, padding))
    return builder.local(_aten.embedding_dense_backward.default, [grad, found.place, count, own, False], {}, [out])[0]


def _local_number(table: Spec, coord: tuple[int, ...], number: int) -> int:
    """A row's number in a piece, -1 where the piece does not hold it."""
    (start, *_), (size, *_) = table.local_box(coord)
    return number - start if start <= number < start + size else -1


def bags(call: OpCall) -> Labels:
    """Bags of rows: features may be split, in the table and in whatever has features."""
    inputs = [_featured(n, s.shape) for n, s in zip(tensor_names(call), call.specs, strict=True)]
    features = call.specs[0].shape[1]
    outputs = [_featured("output" if len(m.shape) == 2 and m.shape[1] == features else "", m.shape) for m in call.outs]
    return Labels(inputs, outputs, alike={"F": [i for i, dims in enumerate(outputs) if "F" not in dims]}, nonempty=frozenset("F"))


def bag_weight_gradients(call: OpCall) -> Labels:
    """The gradient of samples' weights: a sum over features."""
    inputs = [_featured(n, s.shape) for n, s in zip(tensor_names(call), call.specs, strict=True)]
    return Labels(inputs, [[None]], {"F": "sum"}, nonempty=frozenset("F"))


def _featured(name: str, shape: torch.Size) -> list[str | None]:
    wide = name in ("weight", "grad", "output") or (name == "maximum_indices" and len(shape) == 2)
    return [None, "F"] if wide else [None] * len(shape)


TABLE = {
    "_embedding_bag": Rule(bags),
    "_embedding_bag_forward_only": Rule(bags),
    "_embedding_bag_backward": Rule(bags),
    "_embedding_bag_per_sample_weights_backward": Rule(bag_weight_gradients),
    "embedding": Rule(embedding),
    "embedding_dense_backward": Rule(dense_backward),
}
