"""Prices of changing a placement on one mesh axis, in bytes moved by all devices of the axis together."""

from __future__ import annotations

from ..core.placements import Partial, Placement, Replicate, Shard, balanced, starts
from ..core.spec import Spec

LATENCY_NBYTES = 256
"""What starting a collective costs, expressed as bytes, so that fewer collectives win among small ones."""


def change_cost(spec: Spec, axis: int, source: Placement, target: Placement) -> float:
    """Bytes moved over one axis to turn ``source`` into ``target`` there, the other axes as in ``spec``."""
    if source == target or isinstance(source, Replicate):
        return 0
    k = spec.mesh.shape[axis]
    # Cuts of a dim that another axis splits, too, are not told apart.
    alone = isinstance(target, Shard) and spec.sharding_axes(target.dim) == (axis,) and len(target.sizes or range(k)) == k
    moved = _recut(spec, axis, target) if alone and isinstance(target, Shard) else _moved(k, source, target)
    return moved * group_nbytes(spec, axis) + LATENCY_NBYTES


def group_nbytes(spec: Spec, axis: int) -> float:
    """Bytes of the part of the tensor that the devices of one line along ``axis`` share."""
    nbytes: float = spec.nbytes
    for a, placement in enumerate(spec.placements):
        if a != axis and isinstance(placement, Shard):
            nbytes /= spec.mesh.shape[a]
    return nbytes


def _recut(spec: Spec, axis: int, target: Shard) -> float:
    """The part of a tensor that other cuts of the same dim move, more where work lies unevenly between them afterwards."""
    k, n = spec.mesh.shape[axis], spec.shape[target.dim]
    now, then = spec.sizes_on(axis), target.sizes or balanced(n, k)
    both = zip(starts(now), now, starts(then), then, strict=True)
    kept = sum(max(min(a + m, b + p) - max(a, b), 0) for a, m, b, p in both)
    return (n - kept) / max(n, 1) * max(then) / max(*balanced(n, k), 1)


def _moved(k: int, source: Placement, target: Placement) -> float:
    """Multiples of the tensor moved by k devices: ring algorithms for the collectives."""
    if isinstance(source, Partial):
        return (k - 1) * (1 if isinstance(target, Shard) else 2)
    if isinstance(target, Shard):
        return (k - 1) / k * (0.5 if isinstance(source, Shard) and source.dim == target.dim else 1)
    return k - 1
