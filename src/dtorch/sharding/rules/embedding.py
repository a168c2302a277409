"""Embedding: rows of a table by number. A table split by rows is looked up piece by piece, a partial sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...core.placements import Shard
from ...core.spec import Spec
from ..builder import Builder, Value
from ..call import OpCall
from ..labels import Candidate, Labels, PartialRow
from ..rule import Rule
from .compose import letters, named, sharded_on
from .lookup import checked, column, located

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


TABLE = {
    "embedding": Rule(embedding),
    "embedding_dense_backward": Rule(dense_backward),
}
