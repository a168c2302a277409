"""Redistribution: from any placements to any others, on one mesh or across two, moving as few bytes as it can.

On one mesh, one axis changes per step, each step a named collective, and the cheapest order of steps is searched. A
step on an axis that splits a tensor dim is *clean* only while no later axis splits that dim, since the outer split
comes first. What clean steps do not reach, or reach only by moving more, is one exchange, point to point, of exactly
the parts that are needed. Values stay what they are; only where they lie changes.

Where several axes are partial, the later axis reduces first, as the later axis also splits what an earlier one has
split. Reductions that commute may be done in any order.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence

from ..core.placements import REPLICATE, Partial, Placement, Placements, Replicate, Shard
from ..core.spec import Spec
from .builder import Builder, Value, Varying
from .cost import LATENCY_NBYTES
from .exchange import Parts, nbytes_moved, parts_of

Route = list[tuple[int, Placement]]
"""Steps of one axis each: (mesh axis, its new placement)."""


def redistribute(builder: Builder, value: Value, target: Spec) -> Value:
    """Append the steps that bring a value to the target's mesh and placements (shape and dtype alike)."""
    if value.spec is target:
        return value
    moved = _moved(builder, value, target)
    return moved if moved.slot == value.slot or value.spec.stride != target.stride else expanded_again(builder, moved)


def expanded_again(builder: Builder, value: Value) -> Value:
    """A value whose pieces show an element as often in their memory as the whole does, and no order of their own there.

    A write to one of them is one to all, and operators lay their results out on pieces as they do on the whole.
    """
    spec = value.spec
    dims = [d for d, (n, step) in enumerate(zip(spec.shape, spec.stride, strict=True)) if step == 0 and n > 1]
    if not dims:
        return value
    for d in dims:
        value = builder.local("aten::slice.Tensor", [value, d, 0, 1], {}, [spec])[0]

    def sizes(coord: tuple[int, ...]) -> list[int]:
        return [n if d in dims else -1 for d, n in enumerate(spec.local_box(coord)[1])]

    return builder.local("aten::expand.default", [value, Varying(sizes)], {}, [spec])[0]


def _moved(builder: Builder, value: Value, target: Spec) -> Value:
    if value.spec.mesh is not target.mesh:
        return _across_meshes(builder, value, target)
    value = Value(value.slot, _with_target_on_single(value.spec, target))
    if not _commute(value.spec, target):
        for axis in reversed(value.spec.partial_axes):
            value = _one_axis(builder, value, axis, REPLICATE)
    goal = _reduced(value.spec, target)
    value = _shards_moved(builder, value, goal)
    return _make_partials(builder, value, target)


def _with_target_on_single(spec: Spec, target: Spec) -> Spec:
    """On an axis of one device every placement is the same."""
    pairs = zip(spec.placements, target.placements, spec.mesh.shape, strict=True)
    return spec.replace([wanted if k == 1 else now for now, wanted, k in pairs])


def _commute(spec: Spec, target: Spec) -> bool:
    """Whether the partial axes of both, where they change, may be reduced and made in any order."""
    partials = [{a: s.placements[a] for a in s.partial_axes} for s in (spec, target)]
    if partials[0] == partials[1] or len({*partials[0], *partials[1]}) < 2:
        return True
    kinds = {p.reduce_op for row in partials for p in row.values() if isinstance(p, Partial)}
    exact = spec.dtype.is_floating_point or spec.dtype.is_complex
    return kinds <= {"sum", "avg"} if exact else len(kinds) == 1 and kinds != {"avg"}


def _reduced(spec: Spec, target: Spec) -> Spec:
    """The target, but with partial axes only where the value is partial in the same way already."""
    pairs = zip(spec.placements, target.placements, spec.mesh.shape, strict=True)
    return spec.replace([REPLICATE if isinstance(q, Partial) and p != q and k > 1 else q for p, q, k in pairs])


def _shards_moved(builder: Builder, value: Value, goal: Spec) -> Value:
    """Reduce, cut, gather and exchange: everything but making partials."""
    route = _route(value.spec, goal)
    if route is not None and _surely_least(value.spec, route):
        return _follow(builder, value, route)
    reductions = _reductions(value.spec, goal)
    start = _after(value.spec, reductions)
    parts, nbytes = _exchanged(start, goal)
    if route is not None and _cost(value.spec, route) <= _cost(value.spec, reductions) + nbytes + LATENCY_NBYTES * (nbytes > 0):
        return _follow(builder, value, route)
    value = _follow(builder, value, reductions)
    return value if value.spec is goal else _emit_exchange(builder, value, goal, "exchange", parts, nbytes)


def _route(spec: Spec, goal: Spec) -> Route | None:
    """The cheapest sequence of clean steps, or None where clean steps do not lead there."""
    start, count = spec.placements, 0
    best: dict[Placements, float] = {start: 0}
    queue: list[tuple[float, int, Placements, Route]] = [(0, 0, start, [])]
    while queue:
        cost, _, state, route = heapq.heappop(queue)
        if cost > best[state]:
            continue
        steps = list(_steps(spec, state, goal.placements))
        if not steps and not any(_differs(state, goal.placements, a) for a in range(len(state))):
            return route
        for axis, placement in steps:
            after = (*state[:axis], placement, *state[axis + 1 :])
            price = cost + _price(spec, state, axis, placement)
            if price < best.get(after, math.inf):
                best[after] = price
                count += 1
                heapq.heappush(queue, (price, count, after, [*route, (axis, placement)]))
    return None


def _steps(spec: Spec, state: Placements, goal: Placements) -> Iterator[tuple[int, Placement]]:
    """Clean steps towards the goal; giving an axis up on the way counts as one."""
    for axis, (now, wanted) in enumerate(zip(state, goal, strict=True)):
        if not _differs(state, goal, axis) or not _releasable(state, axis):
            continue
        if isinstance(wanted, Shard) and _settable(state, goal, axis):
            yield axis, wanted
        if not isinstance(now, Replicate):
            yield axis, REPLICATE


def _differs(state: Placements, goal: Placements, axis: int) -> bool:
    """Whether an axis is not yet as wanted, be it only that it cuts the same dim at other places."""
    now, wanted = state[axis], goal[axis]
    return now != wanted or (isinstance(now, Shard) and _outer(state, axis) != _outer(goal, axis))


def _outer(placements: Placements, axis: int) -> list[tuple[int, Placement]]:
    """Placements up to an axis that shard the dim which the axis shards: what its cuts depend on."""
    dim = _dim(placements[axis])
    return [(a, p) for a, p in enumerate(placements[: axis + 1]) if _dim(p) == dim]


def _dim(placement: Placement) -> int | None:
    return placement.dim if isinstance(placement, Shard) else None


def _releasable(placements: Placements, axis: int) -> bool:
    """No later axis splits the dim that this axis splits now."""
    dim = _dim(placements[axis])
    return dim is None or all(_dim(p) != dim for p in placements[axis + 1 :])


def _settable(state: Placements, goal: Placements, axis: int) -> bool:
    """The axis may take its goal's shard: earlier axes on that dim are as in the goal, later ones are not on it."""
    dim = _dim(goal[axis])
    earlier = all(p == q for p, q in zip(state[:axis], goal[:axis], strict=True) if dim in (_dim(p), _dim(q)))
    return earlier and all(_dim(p) != dim for p in state[axis + 1 :])


def _price(spec: Spec, state: Placements, axis: int, wanted: Placement) -> float:
    """Bytes that all devices receive in one step, and the latency of a collective; a cut is free."""
    now, k = state[axis], spec.mesh.shape[axis]
    if isinstance(now, Replicate) or k == 1:
        return 0
    return _multiple(k, now, wanted) * _line_nbytes(spec, state, axis) + LATENCY_NBYTES


def _multiple(k: int, now: Placement, wanted: Placement) -> float:
    """What k devices receive together, in multiples of what their line holds: ring algorithms for the collectives."""
    if isinstance(now, Partial):
        return (k - 1) * (1 if isinstance(wanted, Shard) else 2)
    return (k - 1) / k if isinstance(wanted, Shard) else k - 1


def _line_nbytes(spec: Spec, state: Placements, axis: int) -> int:
    """Bytes of the tensor parts that the lines along an axis hold, all lines together."""
    lines = [k for a, (p, k) in enumerate(zip(state, spec.mesh.shape, strict=True)) if a != axis and not isinstance(p, Shard)]
    return spec.nbytes * math.prod(lines)


def _cost(spec: Spec, route: Route) -> float:
    state, cost = spec.placements, 0.0
    for axis, placement in route:
        cost += _price(spec, state, axis, placement)
        state = (*state[:axis], placement, *state[axis + 1 :])
    return cost


def _surely_least(spec: Spec, route: Route) -> bool:
    """Whether no exchange could move less: nothing that arrives is cut afterwards, and only gathers follow each other."""
    state, kinds = list(spec.placements), []
    for axis, placement in route:
        if spec.mesh.shape[axis] > 1:
            now = state[axis]
            kinds.append("cut" if isinstance(now, Replicate) else "gather" if isinstance(placement, Replicate) else "move")
        state[axis] = placement
    moving = [kind for kind in kinds if kind != "cut"]
    return "cut" not in kinds[len(kinds) - len(moving) :] and (len(moving) < 2 or set(moving) == {"gather"})


def _reductions(spec: Spec, goal: Spec) -> Route:
    """Steps that reduce every partial axis which the goal does not keep, scattering where that is clean."""
    route: Route = []
    state = spec.placements
    for axis, (now, wanted) in enumerate(zip(spec.placements, goal.placements, strict=True)):
        if isinstance(now, Partial) and now != wanted:
            scatter = isinstance(wanted, Shard) and _settable(state, goal.placements, axis)
            route.append((axis, wanted if scatter else REPLICATE))
            state = (*state[:axis], route[-1][1], *state[axis + 1 :])
    return route


def _after(spec: Spec, route: Route) -> Spec:
    placements = list(spec.placements)
    for axis, placement in route:
        placements[axis] = placement
    return spec.replace(placements)


def _follow(builder: Builder, value: Value, route: Route) -> Value:
    for axis, placement in route:
        value = _one_axis(builder, value, axis, placement)
    return value


def _one_axis(builder: Builder, value: Value, axis: int, wanted: Placement) -> Value:
    """Change one axis by one collective."""
    spec, now = value.spec, value.spec.placements[axis]
    target = spec.replace((*spec.placements[:axis], wanted, *spec.placements[axis + 1 :]))
    k = spec.mesh.shape[axis]
    if k == 1:
        return Value(value.slot, target)
    nbytes = 0 if isinstance(now, Replicate) else _multiple(k, now, wanted) * _line_nbytes(spec, spec.placements, axis)
    if isinstance(wanted, Replicate):
        if isinstance(now, Partial):
            return builder.collective("all_reduce", value, target, axis, op=now.reduce_op, nbytes=nbytes)
        assert isinstance(now, Shard)
        return builder.collective("all_gather", value, target, axis, dim=now.dim, nbytes=nbytes)
    assert isinstance(wanted, Shard)
    if isinstance(now, Partial):
        return builder.collective(
            "reduce_scatter", value, target, axis, dim=wanted.dim, sizes=target.sizes_on(axis), op=now.reduce_op, nbytes=nbytes
        )
    if isinstance(now, Replicate):
        return builder.collective("slice", value, target, axis, dim=wanted.dim, sizes=target.sizes_on(axis))
    if now.dim == wanted.dim:
        return _emit_exchange(builder, value, target, "all_to_all", *_exchanged(spec, target), axes=(axis,))
    sizes, moved = target.sizes_on(axis), nbytes_moved(spec, target)
    return builder.collective("all_to_all", value, target, axis, dim=wanted.dim, sizes=sizes, nbytes=moved, from_dim=now.dim)


def _exchanged(source: Spec, target: Spec) -> tuple[Parts, int]:
    """The parts of an exchange on one mesh, and the bytes that all devices receive; partial axes are alike on both sides."""
    parts = parts_of(source, target, source.partial_axes)
    return parts, nbytes_moved(source, target)


def _emit_exchange(
    builder: Builder, value: Value, target: Spec, kind: str, parts: Parts, nbytes: int, axes: Sequence[int] = ()
) -> Value:
    changed = axes or [a for a in range(target.mesh.ndim) if _differs(value.spec.placements, target.placements, a)]
    names = "+".join(target.mesh.axis_names()[a] for a in changed)
    return builder.exchange(value, target, parts, [list(size) for _, size in target.boxes], kind, names, nbytes)


def _make_partials(builder: Builder, value: Value, target: Spec) -> Value:
    """Turn replicated axes partial where the target wants it: no communication."""
    for axis, (now, wanted) in enumerate(zip(value.spec.placements, target.placements, strict=True)):
        if isinstance(wanted, Partial) and now != wanted:
            spec = value.spec.replace((*value.spec.placements[:axis], wanted, *value.spec.placements[axis + 1 :]))
            value = builder.collective("fill", value, spec, axis, op=wanted.reduce_op)
    return value


def _across_meshes(builder: Builder, value: Value, target: Spec) -> Value:
    """Reduce what is partial on the source mesh, send each target piece its parts, make partials there."""
    value = redistribute(builder, value, _scattered(value.spec))
    landing = target.replace([REPLICATE if isinstance(p, Partial) else p for p in target.placements])
    parts = parts_of(value.spec, landing)
    nbytes = nbytes_moved(value.spec, landing)
    names = f"{'x'.join(map(str, value.spec.mesh.shape))}->{'x'.join(map(str, landing.mesh.shape))}"
    value = builder.exchange(value, landing, parts, [list(size) for _, size in landing.boxes], "transfer", names, nbytes)
    return _make_partials(builder, value, target)


def _scattered(spec: Spec) -> Spec:
    """A value's placement with its partial axes split over a free dim, which moves half of what replicating them moves."""
    out = list(spec.placements)
    commute = _commute(spec, spec.replace([REPLICATE if isinstance(p, Partial) else p for p in out]))
    for axis, now in enumerate(spec.placements):
        if isinstance(now, Partial):
            taken = {_dim(p) for p in out}
            free = [d for d, n in enumerate(spec.shape) if d not in taken and n >= spec.mesh.shape[axis]]
            out[axis] = Shard(free[0]) if free and commute else REPLICATE
    return spec.replace(out)
