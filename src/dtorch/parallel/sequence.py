"""Sequence parallelism: between tensor-parallel regions, norms and residuals are split along the sequence.

A region begins at modules whose output features are split, and ends at one whose input features are. What such an end
gives are partial sums. Scattered over the sequence they cost half of what adding them up everywhere does; the other half
is the gather at the next beginning. So no more is moved, and between regions each device holds and works on its part.
"""

from __future__ import annotations

from dataclasses import replace

from ..core.placements import REPLICATE, Shard
from .axes import TENSOR
from .plan import Plan, Row
from .styles import STYLES


def over_sequence(plan: Plan) -> Plan:
    """The plan with inputs and outputs of tensor-parallel regions placed so; what it says of them already holds."""
    return Plan(f"{plan.source}, with sp", tuple(_over_sequence(row) for row in plan.rows))


def _over_sequence(row: Row) -> Row:
    side = STYLES[row.weights].side if isinstance(row.weights, str) else None
    if side == "out":
        return replace(row, inputs={TENSOR: REPLICATE, **row.inputs})
    if side in ("in", "rows"):
        return replace(row, outputs={TENSOR: Shard(SEQUENCE_DIM), **row.outputs})
    return row


SEQUENCE_DIM = 1
"""The dim of the sequence in what a layer is given: (batch, sequence, features)."""
