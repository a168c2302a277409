"""Prices of changing a placement on one mesh axis, in bytes moved by all devices of the axis together."""

from __future__ import annotations

from ..core.placements import Partial, Placement, Replicate, Shard
from ..core.spec import Spec

LATENCY_NBYTES = 256
"""What starting a collective costs, expressed as bytes, so that fewer collectives win among small ones."""


def change_cost(spec: Spec, axis: int, source: Placement, target: Placement) -> float:
    """Bytes moved over one axis to turn ``source`` into ``target`` there, the other axes as in ``spec``."""
    if source == target or isinstance(source, Replicate):
        return 0
    k = spec.mesh.shape[axis]
    return _moved(k, source, target) * group_nbytes(spec, axis) + LATENCY_NBYTES


def group_nbytes(spec: Spec, axis: int) -> float:
    """Bytes of the part of the tensor that the devices of one line along ``axis`` share."""
    nbytes: float = spec.nbytes
    for a, placement in enumerate(spec.placements):
        if a != axis and isinstance(placement, Shard):
            nbytes /= spec.mesh.shape[a]
    return nbytes


def _moved(k: int, source: Placement, target: Placement) -> float:
    """Multiples of the tensor moved by k devices: ring algorithms for the collectives."""
    if isinstance(source, Partial):
        return (k - 1) * (1 if isinstance(target, Shard) else 2)
    if isinstance(target, Shard):
        return (k - 1) / k * (0.5 if isinstance(source, Shard) and source.dim == target.dim else 1)
    return k - 1
