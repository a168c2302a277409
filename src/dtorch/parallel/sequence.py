"""Sequence parallelism: between tensor-parallel regions, norms and residuals are split along the sequence.

A region begins at modules whose output features are split, and ends at one whose input features are. What such an end
gives are partial sums. Scattered over the sequence they cost half of what adding them up everywhere does; the other half
is the gather at the next beginning. So no more is moved, and between regions each device holds and works on its part.
A module that holds experts, with the router that chooses among them and what all tokens share, is one region, in which
everything adds to the same partial sums.
"""

from __future__ import annotations

from dataclasses import replace

from ..core.placements import REPLICATE, Partial, Shard
from .axes import TENSOR
from .plan import Plan, Row
from .styles import STYLES


def over_sequence(plan: Plan) -> Plan:
    """The plan with inputs and outputs of tensor-parallel regions placed so; what it says of them already holds."""
    holders = {row.pattern.rpartition(".")[0]: None for row in plan.rows if row.weights == EXPERTS_STYLE}
    rows = [_within(row) if any(row.pattern.startswith(f"{h}.") for h in holders) else _over_sequence(row) for row in plan.rows]
    around = [Row(h, inputs={TENSOR: REPLICATE}, outputs={TENSOR: Shard(SEQUENCE_DIM)}) for h in holders if h]
    return Plan(f"{plan.source}, with sp", (*around, *rows))


def _within(row: Row) -> Row:
    return replace(row, outputs={TENSOR: Partial(), **row.outputs}) if _side(row) == "in" else row


def _over_sequence(row: Row) -> Row:
    side = _side(row)
    if side == "out":
        return replace(row, inputs={TENSOR: REPLICATE, **row.inputs})
    if side in ("in", "rows"):
        return replace(row, outputs={TENSOR: Shard(SEQUENCE_DIM), **row.outputs})
    return row


def _side(row: Row) -> str | None:
    return STYLES[row.weights].side if isinstance(row.weights, str) else None


EXPERTS_STYLE = "moe_tp_experts"
"""What plans say of a module of experts."""

SEQUENCE_DIM = 1
"""The dim of the sequence in what a layer is given: (batch, sequence, features)."""
