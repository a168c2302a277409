"""Padding and trimming by a constant: only the first and the last piece of a split dim change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.placements import Shard
from ...core.spec import Spec
from ..builder import Builder, Value, Varying
from ..call import OpCall
from ..labels import ANY_OP, LINEAR_OPS, Candidate, Labels, PartialRow
from ..rule import Rule
from .compose import changed, letters
from .leafwise import laid
from .pieces import KEPT, leaf_number, leaves, shards_of


@dataclass(frozen=True)
class Padded:
    """``constant_pad_nd``: a split dim is padded, or trimmed, where it begins and ends.

    Attributes:
        labels: what holds for the other dims.
        edges: for each padded dim, what is added before and after.
        length: number of dims that the operator's ``pad`` speaks of, counted from the last.
    """

    labels: Labels
    edges: Mapping[int, tuple[int, int]]
    length: int

    def candidates(self, axis: int, specs: Sequence[Spec], cuts: Mapping[str, tuple[int, ...]]) -> list[Candidate]:
        """The row that keeps the input as it lies, then those of the labels."""
        out = self.labels.candidates(axis, specs, cuts)
        now, mesh = specs[0].placements[axis], specs[0].mesh
        if not (isinstance(now, Shard) and now.dim in self.edges):
            return out
        axes = specs[0].sharding_axes(now.dim)
        label = f"{KEPT}{now.dim}"
        if len(cuts.get(label, (0,))) == math.prod(mesh.shape[a] for a in axes if a < axis):
            sizes = [
                n + before + after
                for (_, n), (before, after) in zip(leaves(specs[0], now.dim), self.pads(specs[0], now.dim), strict=True)
            ]
            placed = shards_of(mesh, now.dim, axes, sizes)[axis]
            assert placed.sizes is not None
            out.insert(0, Candidate((now,), (placed,), label, placed.sizes))
        return out

    def pads(self, spec: Spec, dim: int) -> list[tuple[int, int]]:
        """What each leaf of a dim is padded by, before and after."""
        segments, whole = leaves(spec, dim), spec.shape[dim]
        before, after = self.edges.get(dim, (0, 0))
        out = []
        for number, (start, n) in enumerate(segments):
            low = -before if number == 0 else max(start, -before)
            high = whole + after if number == len(segments) - 1 else min(start + n, whole + after)
            out.append((start - low, high - start - n) if high > low else (0, -n))
        return out

    def steps(self, builder: Builder, call: OpCall, args: Any, kwargs: Any, outs: Sequence[Spec]) -> list[Value]:
        """Pad each piece by its own; a piece that is not padded is copied in its own order of strides, so put that right."""
        x, ndim = args[0], len(args[0].spec.shape)
        rows = {d: self.pads(x.spec, d) for d in range(ndim - self.length, ndim)}
        dims = list(reversed(rows))
        pad = Varying(lambda coord: [n for d in dims for n in rows[d][leaf_number(x.spec, d, coord)]])
        args, kwargs = changed(call, args, kwargs, pad=pad)
        out = builder.local(call.func, args, kwargs, outs)[0]
        return [out if x.spec.meta.is_contiguous() else laid(builder, out, call)]


def padded(call: OpCall) -> Padded:
    """``constant_pad_nd``; a partial sum may be padded with zeros, and any partial trimmed."""
    ndim, pad = len(call.specs[0].shape), call.arg("pad")
    edges = {ndim - 1 - i: (pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2)}
    changed = {d: edge for d, edge in edges.items() if edge != (0, 0)}
    dims = letters(ndim, list(changed))
    trims = all(n <= 0 for n in pad)
    rows = [PartialRow((True,), ANY_OP if trims else LINEAR_OPS)] if trims or call.arg("value", 0) == 0 else []
    return Padded(Labels([dims], [dims], partial=rows), changed, len(edges))


TABLE = {"constant_pad_nd": Rule(padded)}
