"""Serving index tensors from split dims. A dim that is split stays split: each piece serves the numbers it holds.

What a piece reads for the others' numbers is zero, so the result is a partial sum; what it would write for them goes to
a spare row that is dropped. Where the indices are split and writes add up, each piece adds its share to a partial sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...core.placements import REPLICATE, Partial, Placement, Shard
from ...core.spec import Spec
from ..builder import Builder, Value
from ..call import OpCall, leaves, replace_leaves, written_args
from ..labels import Candidate, Labels
from .compose import sharded_on
from .leafwise import with_room
from .lookup import Found, checked, column, located
from .pieces import KEPT, by_leaf, lengths, overlap, resized, shards_of
from .pieces import leaves as leaves_of

_aten = torch.ops.aten


@dataclass(frozen=True)
class Indexed:
    """A rule of an operator that takes places along some dims of its first input from index tensors.

    Attributes:
        labels: rows under which the indexed dims are whole.
        indices: for each indexed dim, the number of its index among the tensor inputs.
        reads: the output is what is found there; else it is the first input with what is written there.
        trailing: how many dims of the output follow those of the indices.
        wraps: negative numbers count from the end.
        adds: labels that the indices bring; sharding one makes the output a partial sum.
        prefix: dims of which the operator uses only the beginning, as much as each input has of it.
    """

    labels: Labels
    indices: Mapping[int, int]
    reads: bool
    trailing: int = 0
    wraps: bool = False
    adds: frozenset[str] = frozenset()
    prefix: tuple[int, ...] = ()

    def candidates(self, axis: int, specs: Sequence[Spec], cuts: Mapping[str, tuple[int, ...]]) -> list[Candidate]:
        """The row that keeps an indexed or prefix dim split, then those of the labels."""
        out = [self._adding(c, specs) for c in self.labels.candidates(axis, specs, cuts)]
        now = specs[0].placements[axis]
        if not isinstance(now, Shard) or not self._kept_so_far(specs[0], axis, now.dim, cuts):
            return out
        label, sizes = f"{KEPT}{now.dim}", specs[0].sizes_on(axis)
        if now.dim in self.indices:
            rest = (REPLICATE,) * (len(specs) - 1)
            found = Partial("max" if specs[0].dtype == torch.bool else "sum")
            out.insert(0, Candidate((now, *rest), (found if self.reads else now,), label, sizes))
        elif now.dim in self.prefix:
            others = [_beginning(specs[0], now.dim, axis, s) for s in specs[1:]]
            out.insert(0, Candidate((now, *others), (others[0] if self.reads else now,), label, sizes))
        return out

    def _kept_so_far(self, spec: Spec, axis: int, dim: int, cuts: Mapping[str, tuple[int, ...]]) -> bool:
        earlier = [spec.mesh.shape[a] for a in spec.sharding_axes(dim) if a < axis]
        return len(cuts.get(f"{KEPT}{dim}", (0,))) == math.prod(earlier)

    def _adding(self, candidate: Candidate, specs: Sequence[Spec]) -> Candidate:
        """Where a piece adds its share, all but one of them add to zeros."""
        if candidate.label not in self.adds:
            return candidate
        return Candidate((Partial(), *candidate.inputs[1:]), candidate.outputs, candidate.label, candidate.sizes)

    def steps(self, builder: Builder, call: OpCall, args: Any, kwargs: Any, outs: Sequence[Spec]) -> list[Value] | None:
        """Serve what each piece holds of the indexed dims that are split; None where they are whole."""
        values = list(leaves((args, kwargs), Value))
        split = [d for d in self.indices if sharded_on(values[0].spec, [d])]
        if not split:
            return None
        held = values[0]
        places: dict[int, Value] = {}
        outside: Value | None = None
        for d in split:
            found = self._found(builder, values[self.indices[d]], held.spec, d)
            places[d] = found.place
            outside = found.outside if outside is None else _either(builder, outside, found.outside)
        assert outside is not None
        if self.reads:
            return self._read(builder, call, (args, kwargs), held, places, outside, outs)
        return self._write(builder, call, (args, kwargs), held, places, outside, outs)

    def _found(self, builder: Builder, numbers: Value, table: Spec, dim: int) -> Found:
        count = table.shape[dim]
        if self.wraps:
            negative = builder.op(_aten.lt.Scalar, numbers, 0)
            numbers = builder.op(_aten.where.self, negative, builder.op(_aten.add.Scalar, numbers, count), numbers)
        checked(builder, numbers, count, f"index out of range for a dim of size {count}")
        return located(builder, numbers, table, dim)

    def _read(
        self,
        builder: Builder,
        call: OpCall,
        tree: Any,
        held: Value,
        places: Mapping[int, Value],
        outside: Value,
        outs: Sequence[Spec],
    ) -> list[Value]:
        room = with_room(builder, held, {d: [int(n == 0) for n in lengths(held.spec, d)] for d in places})
        args, kwargs = self._placed(tree, room, places)
        out = builder.local(call.func, args, kwargs, outs)[0]
        for _ in range(self.trailing):
            outside = column(builder, outside, len(outside.spec.shape))
        return builder.local(_aten.masked_fill_.Scalar, [out, outside, 0], {}, outs)

    def _write(
        self,
        builder: Builder,
        call: OpCall,
        tree: Any,
        held: Value,
        places: Mapping[int, Value],
        outside: Value,
        outs: Sequence[Spec],
    ) -> list[Value]:
        room = with_room(builder, held, {d: [1 for _ in lengths(held.spec, d)] for d in places})
        spare: dict[int, Value] = {}
        for d, place in places.items():
            end = by_leaf(held.spec, d, lengths(held.spec, d))
            spare[d] = builder.local(
                _aten.masked_fill.Scalar, [place, outside, end], {}, [_broadcast(place.spec, outside.spec, place.spec.dtype)]
            )[0]
        args, kwargs = self._placed(tree, room, spare)
        out = builder.local(call.func, args, kwargs, [room.spec])[0]
        for d in places:
            end = by_leaf(held.spec, d, lengths(held.spec, d))
            out = builder.local(_aten.slice.Tensor, [out, d, 0, end], {}, [resized(out.spec, d, lengths(held.spec, d))])[0]
        if written_args(call.func):
            builder.local(_aten.copy_.default, [held, out], {}, [held.spec])
            return [held]
        order = torch.contiguous_format if outs[0].meta.is_contiguous() else torch.preserve_format
        return builder.local(_aten.clone.default, [out], {"memory_format": order}, outs)

    def _placed(self, tree: Any, held: Value, places: Mapping[int, Value]) -> Any:
        """The arguments with the first input and the indices replaced."""
        inverse = {number: places[d] for d, number in self.indices.items() if d in places}
        counter = iter(range(1 << 30))

        def swap(value: Value) -> Value:
            number = next(counter)
            return held if number == 0 else inverse.get(number, value)

        return replace_leaves(tree, Value, swap)


def _either(builder: Builder, first: Value, second: Value) -> Value:
    """Logical or of two masks that broadcast; they may differ along different axes."""
    return builder.local(_aten.logical_or.default, [first, second], {}, [_broadcast(first.spec, second.spec, torch.bool)])[0]


def _broadcast(first: Spec, second: Spec, dtype: torch.dtype) -> Spec:
    """The spec of what differs along every axis along which one of two tensors that broadcast does."""
    axes = {*first.axes, *second.axes}
    placements = [Partial() if a in axes else REPLICATE for a in range(first.mesh.ndim)]
    return Spec.make(first.mesh, placements, torch.broadcast_shapes(first.shape, second.shape), dtype)


def _beginning(spec: Spec, dim: int, axis: int, other: Spec) -> Placement:
    """How another tensor, which has less (or more) of a dim, lies beside the leaves of the first one."""
    axes = spec.sharding_axes(dim)
    segments, n = leaves_of(spec, dim), other.shape[dim]
    sizes = [overlap(s, 0, n) for s in segments[:-1]]
    return shards_of(spec.mesh, dim, axes, [*sizes, n - sum(sizes)])[axis]
