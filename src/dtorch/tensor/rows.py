"""Rows of a tensor sent along a mesh axis, differentiably."""

from __future__ import annotations

from typing import Any

import torch

from ..sharding.rows import Counts, answered, plan_rows
from . import moving


def rows_sent(tensor: Any, axis: int, counts: Counts) -> Any:
    """The tensor with its rows where they are sent, on each device in the order of who sent them; one all-to-all.

    What it gives holds the same rows in another order. ``answered`` gives the counts that undo it.

    Args:
        tensor: split along dim 0 on ``axis``, no other dim being split.
        axis: number of the mesh axis.
        counts: for each piece, how many of its rows go to each device along the axis; its rows stand in that order.
    """
    return RowsSent.apply(tensor, axis, counts)


class RowsSent(torch.autograd.Function):
    """Sending rows; their gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, axis: int, counts: Counts) -> Any:
        source = tensor._spec
        out = moving.run_plan(("rows", source, axis, counts), lambda: plan_rows(source, axis, counts), [tensor], explicit=True)
        ctx.axis, ctx.back, ctx.placements = axis, answered(source, axis, counts), out[0]._spec.placements
        return out[0]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, None, None]:
        return RowsSent.apply(grad.redistribute(placements=ctx.placements), ctx.axis, ctx.back), None, None
