"""Attention where a cut of the query heads leaves the groups that share a key and value head, or leaves a device with none.

Keys and values are whole along their heads. Each device takes those that its queries need, and repeats them where it holds
parts of several groups. A device without a query head runs the kernel, which would fail on nothing, on one made up, and
drops what comes of it. Gradients of keys and values are partial: each device adds up those of its own queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...core.mesh import coordinates
from ...core.placements import Placement, Shard
from ...core.spec import Spec
from ..builder import Builder, Value, Varying
from ..call import OpCall
from ..labels import Labels
from .compose import changed, named, tensor_names

_aten = torch.ops.aten
HEADS = 1
"""The dim of heads: (batch, heads, positions, features)."""

Coord = tuple[int, ...]
Count = Callable[[Coord], int]
Kernel = Callable[[Builder, OpCall, Any, Any, Sequence[Spec]], list[Value]]


def parts_groups(call: OpCall) -> bool:
    """Whether query heads are cut so that the groups of whole key and value heads do not come out even."""
    query, key = call.arg("query"), call.arg("key")
    axes = [a for a in query.sharding_axes(HEADS) if a in query.axes]
    if not axes or not key.shape[HEADS]:
        return False
    shared = query.shape[HEADS] // key.shape[HEADS]
    cuts = [(offset[HEADS], size[HEADS]) for offset, size in query.boxes]
    if set(axes) & set(key.sharding_axes(HEADS)):
        return False
    return any(n == 0 or at % shared or n % shared for at, n in cuts)


def run_on_own_heads(
    labels: Labels, builder: Builder, call: OpCall, args: Any, kwargs: Any, outs: Sequence[Spec], kernel: Kernel
) -> list[Value]:
    """Run an attention kernel, forward or backward, on the heads that each device has.

    Args:
        labels: of the call; the label ``h`` is that of query heads.
        outs: specs of the results: those without ``h`` that are gradients of keys and values are partial.
        kernel: runs the call with given arguments and specs of results.
    """
    given, names = named(call, args, kwargs), tensor_names(call)
    cut = _Cut(given["query"].spec, given["key"].spec.shape[HEADS])
    if not cut.axes:
        return kernel(builder, call, args, kwargs, outs)
    new = {n: cut.filled(builder, given[n], dims.index("h")) for n, dims in zip(names, labels.inputs, strict=True) if "h" in dims}
    new |= {n: cut.taken(builder, given[n]) for n in ("key", "value")}
    args, kwargs = changed(call, args, kwargs, **new)
    at = [list(dims).index("h") if "h" in dims else None for dims in labels.outputs]
    of_keys = (1, 2) if "logsumexp" in names else ()
    local = [cut.local_spec(spec, n in of_keys, dim) for n, (spec, dim) in enumerate(zip(outs, at, strict=True))]
    results = kernel(builder, call, args, kwargs, local)
    for n, (result, spec, dim) in enumerate(zip(results, outs, at, strict=True)):
        if n in of_keys:
            results[n] = cut.given_back(builder, result, spec)
        elif dim is not None and cut.gaps:
            results[n] = builder.local(_aten.slice.Tensor, [result, dim, 0, Varying(cut.own)], {}, [spec])[0]
    return results


@dataclass(frozen=True)
class _Cut:
    """A cut of query heads over the devices, and which of ``groups`` key and value heads each needs."""

    query: Spec
    groups: int

    @property
    def shared(self) -> int:
        """Query heads to one key and value head."""
        return self.query.shape[HEADS] // self.groups

    @property
    def axes(self) -> list[int]:
        """Mesh axes that cut the heads."""
        return [a for a in self.query.sharding_axes(HEADS) if a in self.query.axes]

    @property
    def gaps(self) -> bool:
        """Whether some device has no query head."""
        return any(size[HEADS] == 0 for _, size in self.query.boxes)

    @property
    def ragged(self) -> bool:
        """Whether some device has part of one group and of another, so that its groups differ in size."""
        return any(
            self.count(c) > 1 and (self.first(c) % self.shared or self.last(c) % self.shared)
            for c in coordinates(self.query.mesh.shape)
        )

    def own(self, coord: Coord) -> int:
        """Query heads of a device."""
        return self.query.local_box(coord)[1][HEADS]

    def first(self, coord: Coord) -> int:
        """The first query head that a device works on; where it has none, some head."""
        return min(self.query.local_box(coord)[0][HEADS], self.query.shape[HEADS] - 1)

    def last(self, coord: Coord) -> int:
        """The end of the query heads that a device works on."""
        return self.first(coord) + max(self.own(coord), 1)

    def begin(self, coord: Coord) -> int:
        """The first key and value head that a device needs."""
        return self.first(coord) // self.shared

    def end(self, coord: Coord) -> int:
        """The end of the key and value heads that a device needs."""
        return (self.last(coord) - 1) // self.shared + 1

    def count(self, coord: Coord) -> int:
        """How many key and value heads a device needs."""
        return self.end(coord) - self.begin(coord)

    def worked(self, coord: Coord) -> int:
        """How many query heads a device works on."""
        return max(self.own(coord), 1)

    def before(self, coord: Coord) -> int:
        """Query heads of a device's first group that are not its own."""
        return self.first(coord) - self.begin(coord) * self.shared

    def placed(self, spec: Spec, dim: int, count: Count) -> Spec:
        """A spec with heads on a dim, ``count(coord)`` on each device."""
        placements: list[Placement] = list(spec.placements)
        sizes = [count(c) for c in self._lines()]
        for axis in reversed(self.axes):
            placements[axis] = Shard(dim, tuple(sizes))
            k = spec.mesh.shape[axis]
            sizes = [sum(sizes[i : i + k]) for i in range(0, len(sizes), k)]
        shape = [sizes[0] if d == dim else n for d, n in enumerate(spec.shape)]
        return Spec.make(spec.mesh, placements, shape, spec.dtype)

    def _lines(self) -> list[Coord]:
        """A coordinate for each part of the heads, in order."""
        grid = coordinates([self.query.mesh.shape[a] for a in self.axes])
        return [tuple(dict(zip(self.axes, c, strict=True)).get(a, 0) for a in range(self.query.mesh.ndim)) for c in grid]

    def local_spec(self, spec: Spec, of_keys: bool, dim: int | None) -> Spec:
        """What the kernel gives where the call is to give ``spec``."""
        if of_keys:
            return self.placed(spec, HEADS, self.worked if self.ragged else self.count)
        return spec if dim is None or not self.gaps else self.placed(spec, dim, self.worked)

    def filled(self, builder: Builder, value: Value, dim: int) -> Value:
        """A tensor of query heads with one head of zeros where a device has none."""
        if not self.gaps:
            return value
        tail = [0, 0] * (len(value.spec.shape) - 1 - dim)
        pads = Varying(lambda c: [*tail, 0, self.worked(c) - self.own(c)])
        return builder.local(_aten.constant_pad_nd.default, [value, pads], {}, [self.placed(value.spec, dim, self.worked)])[0]

    def taken(self, builder: Builder, value: Value) -> Value:
        """Of whole keys or values the heads that each device needs; one for each query head where groups are ragged."""
        args = [value, HEADS, Varying(self.begin), Varying(self.end)]
        value = builder.local(_aten.slice.Tensor, args, {}, [self.placed(value.spec, HEADS, self.count)])[0]
        if not self.ragged:
            return value
        wide = self.placed(value.spec, HEADS, lambda c: self.count(c) * self.shared)
        value = builder.local(_aten.repeat_interleave.self_int, [value, self.shared, HEADS], {}, [wide])[0]
        args = [value, HEADS, Varying(self.before), Varying(lambda c: self.before(c) + self.worked(c))]
        return builder.local(_aten.slice.Tensor, args, {}, [self.placed(value.spec, HEADS, self.worked)])[0]

    def given_back(self, builder: Builder, grad: Value, whole: Spec) -> Value:
        """A gradient of the heads that were taken as one of all heads: partial, zeros for those that were not."""

        kept: Count = self.own if self.ragged else lambda c: self.count(c) if self.own(c) else 0
        if self.gaps:
            args = [grad, HEADS, 0, Varying(kept)]
            grad = builder.local(_aten.slice.Tensor, args, {}, [self.placed(grad.spec, HEADS, kept)])[0]
        if self.ragged:
            wide = self.placed(grad.spec, HEADS, lambda c: self.count(c) * self.shared)
            grad = _padded(builder, grad, self.before, lambda c: self.count(c) * self.shared - self.before(c) - self.own(c), wide)
            kept = self.count
            grouped = self.placed(grad.spec, HEADS, kept)
            apart = Spec.make(wide.mesh, grouped.placements, [*grouped.shape[:2], self.shared, *grouped.shape[2:]], grouped.dtype)
            grad = builder.local(_aten.unflatten.int, [grad, HEADS, [-1, self.shared]], {}, [apart])[0]
            grad = builder.local(_aten.sum.dim_IntList, [grad, [HEADS + 1]], {}, [grouped])[0]
        return _padded(builder, grad, self.begin, lambda c: self.groups - self.begin(c) - kept(c), whole)


def _padded(builder: Builder, value: Value, before: Count, after: Count, spec: Spec) -> Value:
    """A tensor with heads of zeros added on both sides, its dims in memory in the order that its new spec promises."""
    order = spec.order
    turn = order != tuple(range(len(order)))
    if turn:
        value = builder.local(_aten.permute.default, [value, list(order)], {}, [_turned(value.spec, order)])[0]
    tail = [0, 0] * (len(order) - 1 - order.index(HEADS))
    pads = Varying(lambda c: [*tail, before(c), after(c)])
    value = builder.local(_aten.constant_pad_nd.default, [value, pads], {}, [_turned(spec, order)])[0]
    # Where a device adds nothing, padding keeps whatever order there was.
    value = builder.local(_aten.contiguous.default, [value], {}, [value.spec])[0]
    back = [order.index(d) for d in range(len(order))]
    return builder.local(_aten.permute.default, [value, back], {}, [spec])[0] if turn else Value(value.slot, spec)


def _turned(spec: Spec, order: Sequence[int]) -> Spec:
    """The spec of a tensor with its dims in another order."""
    placements = [Shard(order.index(p.dim), p.sizes) if isinstance(p, Shard) else p for p in spec.placements]
    return Spec.make(spec.mesh, placements, [spec.shape[d] for d in order], spec.dtype)
