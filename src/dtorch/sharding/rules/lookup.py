"""Local lookup in a sharded dim: each piece finds what it holds, and says which positions it does not hold.

A class or row number counts along the whole dim. A piece that holds ``[start, start + size)`` looks up
``number - start`` where that lies inside, and any valid place elsewhere; what it found elsewhere is masked. So the local
kernel never sees a wrong number. A number that no piece holds would give silent zeros: ``checked`` raises first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...core.placements import REPLICATE, Partial, Shard
from ...core.spec import Spec
from ..builder import Builder, Value, Varying

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Found:
    """Where to look.

    Attributes:
        place: a valid local number for every position; 0 where the piece is empty.
        outside: true where the piece does not hold the number.
    """

    place: Value
    outside: Value


def varying(spec: Spec, axes: tuple[int, ...], dtype: torch.dtype | None = None) -> Spec:
    """The spec of a value that differs along some more axes, there a partial sum of nothing meaningful."""
    placements = [Partial() if a in axes else p for a, p in enumerate(spec.placements)]
    return Spec.make(spec.mesh, placements, spec.shape, dtype or spec.dtype, spec.stride)


def located(builder: Builder, numbers: Value, table: Spec, dim: int) -> Found:
    """Find numbers in the pieces of a dim of ``table``; ``numbers`` are whole along the axes that split it."""
    spec = varying(numbers.spec, table.sharding_axes(dim))

    def run(coord: tuple[int, ...]) -> tuple[int, int]:
        (offset, size), beyond = table.local_box(coord), -table.shape[dim] - 1
        # Seen from beyond, no number lies inside, so an empty piece holds none.
        return (offset[dim], size[dim] - 1) if size[dim] else (beyond, 0)

    start, last = Varying(lambda coord: run(coord)[0]), Varying(lambda coord: run(coord)[1])
    shifted = builder.local(_aten.sub.Scalar, [numbers, start], {}, [spec])[0]
    place = builder.local(_aten.clamp.default, [shifted, 0, last], {}, [spec])[0]
    outside = builder.local(_aten.ne.Tensor, [place, shifted], {}, [varying(spec, (), torch.bool)])[0]
    return Found(place, outside)


def checked(builder: Builder, numbers: Value, count: int, message: str, ignored: int | None = None) -> None:
    """Raise on the worker where a number is neither in ``[0, count)`` nor ``ignored``."""
    kept = builder.local(_aten.clamp.default, [numbers, 0, count - 1], {}, [numbers.spec])[0]
    mask = varying(numbers.spec, (), torch.bool)
    fine = builder.local(_aten.eq.Tensor, [kept, numbers], {}, [mask])[0]
    if ignored is not None:
        skipped = builder.local(_aten.eq.Scalar, [numbers, ignored], {}, [mask])[0]
        fine = builder.local(_aten.logical_or.default, [fine, skipped], {}, [mask])[0]
    placements = [Partial("min") if a in mask.axes else REPLICATE for a in range(mask.mesh.ndim)]
    everywhere = builder.local(_aten.all.default, [fine], {}, [Spec.make(mask.mesh, placements, (), torch.bool)])[0]
    builder.local(_aten._assert_async.msg, [everywhere, message], {}, [])


def column(builder: Builder, value: Value, dim: int) -> Value:
    """The value with one more dim, of size 1."""
    spec = value.spec
    placements = [Shard(p.dim + 1, p.sizes) if isinstance(p, Shard) and p.dim >= dim else p for p in spec.placements]
    widened = Spec.make(spec.mesh, placements, (*spec.shape[:dim], 1, *spec.shape[dim:]), spec.dtype)
    return builder.local(_aten.unsqueeze.default, [value, dim], {}, [widened])[0]
