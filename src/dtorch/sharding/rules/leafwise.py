"""Steps on the leaves of a split dim: make room, trim, gather, and take what lies before a leaf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...core.placements import REPLICATE, Shard
from ...core.spec import Spec
from ..builder import Builder, Value, Varying
from ..call import OpCall, OutMeta
from ..redistribute import redistribute
from .pieces import by_leaf, leaf_number, lengths, resized

_aten = torch.ops.aten


def placed(value: Value, meta: OutMeta) -> Spec:
    """The spec of an output that lies as a value of its shape does."""
    return Spec.make(value.spec.mesh, value.spec.placements, meta.shape, meta.dtype, meta.stride)


def gathered(builder: Builder, value: Value, dim: int) -> Value:
    """The value whole along a dim; other dims stay split."""
    placements = [REPLICATE if isinstance(p, Shard) and p.dim == dim else p for p in value.spec.placements]
    return redistribute(builder, value, value.spec.replace(placements))


def with_room(builder: Builder, value: Value, extra: Mapping[int, Sequence[int]], fill: Any = 0) -> Value:
    """The value with so many more elements at the end of each leaf: ``extra[dim][leaf]``."""
    if not any(n for row in extra.values() for n in row):
        return value
    ndim, spec = len(value.spec.shape), value.spec
    for d, row in extra.items():
        spec = resized(spec, d, [n + more for n, more in zip(lengths(value.spec, d), row, strict=True)])

    def pad(coord: tuple[int, ...]) -> list[int]:
        out = []
        for d in range(ndim - 1, min(extra) - 1, -1):
            out += [0, extra[d][leaf_number(value.spec, d, coord)] if d in extra else 0]
        return out

    return builder.local(_aten.constant_pad_nd.default, [value, Varying(pad), fill], {}, [spec])[0]


def part(builder: Builder, value: Value, dim: int, starts: Sequence[int], ends: Sequence[int]) -> Value:
    """The slice ``[start, end)`` of each leaf of a split dim."""
    spec = resized(value.spec, dim, [b - a for a, b in zip(starts, ends, strict=True)])
    bounds = by_leaf(value.spec, dim, starts), by_leaf(value.spec, dim, ends)
    return builder.local(_aten.slice.Tensor, [value, dim, *bounds], {}, [spec])[0]


def part_of_whole(builder: Builder, whole: Value, like: Spec, dim: int, starts: Sequence[int], ends: Sequence[int]) -> Value:
    """For each leaf of a dim of ``like``, the slice ``[start, end)`` of a value that is whole along that dim."""
    sizes = [b - a for a, b in zip(starts, ends, strict=True)]
    shape = [n if d == dim else m for d, (n, m) in enumerate(zip(like.shape, whole.spec.shape, strict=True))]
    spec = resized(Spec.make(like.mesh, like.placements, shape, whole.spec.dtype), dim, sizes)
    bounds = by_leaf(like, dim, starts), by_leaf(like, dim, ends)
    return builder.local(_aten.slice.Tensor, [whole, dim, *bounds], {}, [spec])[0]


def laid(builder: Builder, value: Value, call: OpCall, number: int = 0) -> Value:
    """An output copied into memory of its own, in the order that its global stride promises."""
    spec = placed(value, call.outs[number])
    order = torch.contiguous_format if spec.meta.is_contiguous() else torch.preserve_format
    return builder.local(_aten.clone.default, [value], {"memory_format": order}, [spec])[0]
