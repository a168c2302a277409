"""Redistribution: from any placements to any others, on one mesh or across two, moving as few bytes as it can.

On one mesh, one axis changes per step, each step a named collective. A step on an axis that splits a tensor dim is
*clean* only while no later axis splits that dim, since the outer split comes first. What no order of clean steps
reaches is one exchange, point to point, of exactly the parts that are needed. Values stay what they are; only where
they lie changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ..core.mesh import coordinates
from ..core.placements import REPLICATE, Partial, Placement, Replicate, Shard
from ..core.spec import Spec
from .builder import Builder, Value
from .cost import group_nbytes


def redistribute(builder: Builder, value: Value, target: Spec) -> Value:
    """Append the steps that bring a value to the target's mesh and placements (shape and dtype alike)."""
    if value.spec is target:
        return value
    if value.spec.mesh is not target.mesh:
        return _across_meshes(builder, value, target)
    value = _reduce_partials(builder, value, target)
    while (step := _clean_step(value.spec, target)) is not None:
        value = _one_axis(builder, value, *step)
    if _shards(value.spec.placements) != _shards(_without_partials(target).placements):
        value = _exchange(builder, value, _without_partials(target))
    return _make_partials(builder, value, target)


def _reduce_partials(builder: Builder, value: Value, target: Spec) -> Value:
    """Reduce every partial axis that the target does not want partial in the same way."""
    for axis, (now, wanted) in enumerate(zip(value.spec.placements, target.placements, strict=True)):
        if not isinstance(now, Partial) or now == wanted:
            continue
        scatter = isinstance(wanted, Shard) and _settable(value.spec, target, axis) and now.reduce_op in ("sum", "avg")
        value = _one_axis(builder, value, axis, wanted if scatter else REPLICATE)
    return value


def _clean_step(spec: Spec, target: Spec) -> tuple[int, Placement] | None:
    """The next axis to change and what to: first splits (they shrink what is moved), then moves, then gathers."""
    gathers = []
    for axis, (now, wanted) in enumerate(zip(spec.placements, target.placements, strict=True)):
        if isinstance(wanted, Partial):
            wanted = now if isinstance(now, Partial) else REPLICATE
        if now == wanted and not _sizes_differ(spec, target, axis):
            continue
        if isinstance(wanted, Shard) and _settable(spec, target, axis) and _releasable(spec, axis):
            if isinstance(now, Replicate):
                return axis, wanted
            gathers.insert(0, (axis, wanted))
        elif isinstance(wanted, Replicate) and _releasable(spec, axis):
            gathers.append((axis, wanted))
    return gathers[0] if gathers else None


def _sizes_differ(spec: Spec, target: Spec, axis: int) -> bool:
    """Whether an axis that shards the same dim before and after cuts it at other places."""
    return isinstance(spec.placements[axis], Shard) and isinstance(target.placements[axis], Shard) and _outer(spec, axis) != _outer(target, axis)


def _outer(spec: Spec, axis: int) -> list[Placement]:
    """Placements up to an axis that shard the dim which the axis shards: what its cuts depend on."""
    dim = _dim(spec.placements[axis])
    return [p for p in spec.placements[: axis + 1] if _dim(p) == dim]


def _dim(placement: Placement) -> int | None:
    return placement.dim if isinstance(placement, Shard) else None


def _releasable(spec: Spec, axis: int) -> bool:
    """No later axis splits the dim that this axis splits now."""
    dim = _dim(spec.placements[axis])
    return dim is None or all(_dim(p) != dim for p in spec.placements[axis + 1 :])


def _settable(spec: Spec, target: Spec, axis: int) -> bool:
    """The axis may take its target shard: earlier axes on that dim are as in the target, later ones are not on it."""
    dim = _dim(target.placements[axis])
    earlier = all((_dim(p) == dim) == (_dim(q) == dim) and (_dim(p) != dim or p == q) for p, q in zip(spec.placements[:axis], target.placements[:axis], strict=True))
    return earlier and all(_dim(p) != dim for p in spec.placements[axis + 1 :])


def _one_axis(builder: Builder, value: Value, axis: int, wanted: Placement) -> Value:
    """Change one axis by one collective."""
    spec, now = value.spec, value.spec.placements[axis]
    placements = (*spec.placements[:axis], wanted, *spec.placements[axis + 1 :])
    target = spec.replace(placements)
    if axis not in spec.axes and axis not in target.axes:
        return Value(value.slot, target)
    k = spec.mesh.shape[axis]
    whole = group_nbytes(spec, axis) * (spec.mesh.size() // k)
    if isinstance(wanted, Replicate) and isinstance(now, Partial):
        return builder.collective("all_reduce", value, target, axis, op=now.reduce_op, nbytes=2 * (k - 1) * whole)
    if isinstance(wanted, Replicate):
        assert isinstance(now, Shard)
        return builder.collective("all_gather", value, target, axis, dim=now.dim, sizes=spec.sizes_on(axis), nbytes=(k - 1) * whole)
    assert isinstance(wanted, Shard)
    if isinstance(now, Partial):
        return builder.collective("reduce_scatter", value, target, axis, dim=wanted.dim, sizes=target.sizes_on(axis), op=now.reduce_op, nbytes=(k - 1) * whole)
    if isinstance(now, Replicate):
        return builder.collective("slice", value, target, axis, dim=wanted.dim, sizes=target.sizes_on(axis))
    return _exchange(builder, value, target, kind="all_to_all", axes=(axis,))


def _without_partials(spec: Spec) -> Spec:
    return spec.replace([REPLICATE if isinstance(p, Partial) else p for p in spec.placements])


def _shards(placements: Sequence[Placement]) -> list[Placement]:
    return [p if isinstance(p, Shard) else REPLICATE for p in placements]


def _make_partials(builder: Builder, value: Value, target: Spec) -> Value:
    """Turn replicated axes partial where the target wants it: no communication."""
    for axis, (now, wanted) in enumerate(zip(value.spec.placements, target.placements, strict=True)):
        if isinstance(wanted, Partial) and now != wanted:
            placements = (*value.spec.placements[:axis], wanted, *value.spec.placements[axis + 1 :])
            spec = value.spec.replace(placements)
            value = builder.collective("fill", value, spec, axis, op=wanted.reduce_op) if axis in spec.axes else Value(value.slot, spec)
    return value


def _exchange(builder: Builder, value: Value, target: Spec, kind: str = "exchange", axes: tuple[int, ...] | None = None) -> Value:
    """One exchange on one mesh; partial axes, if any, are kept partial alike on both sides."""
    source, mesh = value.spec, value.spec.mesh
    target = source.replace([p if isinstance(p, Partial) else q for p, q in zip(source.placements, target.placements, strict=True)])
    changed = axes or tuple(a for a, (p, q) in enumerate(zip(source.placements, target.placements, strict=True)) if p != q or isinstance(p, Shard))
    parts, moved = _parts(source, target, tuple(a for a in source.partial_axes))
    copies = mesh.size() // max(len(target.boxes), 1)
    names = "+".join(mesh.axis_names()[a] for a in changed)
    shapes = [list(size) for _, size in target.boxes]
    return builder.exchange(value, target, parts, shapes, kind, names, moved * source.dtype.itemsize * copies)


def _parts(source: Spec, target: Spec, partial_axes: tuple[int, ...]) -> tuple[list, int]:
    """For each target piece, the source parts that make it up, and how many elements come from another device."""
    grid = list(coordinates(source.piece_grid))
    parts, moved = [], 0
    for t, coord in enumerate(coordinates(target.piece_grid)):
        at = {a: c for a, c in zip(target.axes, coord, strict=True)}
        fixed = {a: at[a] for a in partial_axes}
        own = source.piece_of([at.get(a, 0) for a in range(source.mesh.ndim)]) if source.mesh is target.mesh else -1
        row = list(_overlaps(source, grid, target.boxes[t], fixed))
        moved += sum(math.prod(size) for s, _, _, size in row if s != own)
        parts.append(row)
    return parts, moved


def _overlaps(source: Spec, grid: list, box: tuple, fixed: dict[int, int]) -> Iterator[tuple[int, list[int], list[int], list[int]]]:
    """Parts of source pieces inside a target box: (piece, offset in source, offset in target, size)."""
    offset, size = box
    for s, (start, length) in enumerate(source.boxes):
        if any(c != fixed[a] for a, c in zip(source.axes, grid[s], strict=True) if a in fixed):
            continue
        low = [max(o, b) for o, b in zip(offset, start, strict=True)]
        high = [min(o + n, b + m) for o, n, b, m in zip(offset, size, start, length, strict=True)]
        if all(h > l for h, l in zip(high, low, strict=True)):
            yield s, [l - b for l, b in zip(low, start, strict=True)], [l - o for l, o in zip(low, offset, strict=True)], [h - l for h, l in zip(high, low, strict=True)]


def _across_meshes(builder: Builder, value: Value, target: Spec) -> Value:
    """Reduce what is partial on the source mesh, send each target piece its parts, make partials there."""
    source = _without_partials(value.spec)
    value = redistribute(builder, value, source)
    landing = _without_partials(target)
    parts, _ = _parts(source, landing, ())
    held = set(source.mesh.ids) if source.mesh.device_type == landing.mesh.device_type else set()
    moved = 0
    for coord in coordinates(landing.mesh.shape):
        box = landing.local_box(coord)
        device = landing.mesh.device_at(coord)
        keeps = device in held and source.local_box(_coordinate(source, device)) == box
        moved += 0 if keeps else math.prod(box[1])
    names = f"{'x'.join(map(str, source.mesh.shape))}->{'x'.join(map(str, landing.mesh.shape))}"
    shapes = [list(size) for _, size in landing.boxes]
    value = builder.exchange(value, landing, parts, shapes, "transfer", names, moved * source.dtype.itemsize)
    return _make_partials(builder, value, target)


def _coordinate(spec: Spec, device: int) -> tuple[int, ...]:
    index, coord = spec.mesh.ids.index(device), []
    for n in reversed(spec.mesh.shape):
        index, c = divmod(index, n)
        coord.append(c)
    return tuple(reversed(coord))
