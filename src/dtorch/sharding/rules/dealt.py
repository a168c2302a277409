"""Values dealt out in order to the places that a mask names: each place is numbered by a running sum, and reads its own.

The places stay split; of what lies before a piece only one number is sent.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..builder import Builder, Value
from ..call import OpCall
from ..rule import Rule
from .compose import product, settled
from .indexing import whole

_aten = torch.ops.aten


def dealt_out(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value] | None:
    """``masked_scatter``: the mask's n-th place reads the source's n-th value."""
    x, mask, source = (settled(builder, v) for v in args)
    shape = call.outs[0].shape
    if not shape or not shape.numel() or not source.spec.shape.numel():
        return None
    mask = builder.op(_aten.expand.default, mask, list(shape))
    flat = _flat(builder, mask)
    numbers = product(builder, _numbers(builder, flat), flat)
    found = builder.op(_aten.index_select.default, _flat(builder, source), 0, numbers)
    found = builder.op(_aten.view.default, settled(builder, found), list(shape))
    return [builder.op(_aten.where.self, mask, found, builder.op(_aten.expand.default, x, list(shape)))]


def collected(builder: Builder, call: OpCall, args: Any, kwargs: Any) -> list[Value] | None:
    """``masked_scatter_backward``: the source's n-th gradient is that of the mask's n-th place; zeros where there is none."""
    grad, mask, sizes = settled(builder, args[0]), settled(builder, args[1]), list(args[2])
    shape, count = grad.spec.shape, math.prod(sizes)
    if not shape or not shape.numel():
        return None
    flat = _flat(builder, builder.op(_aten.expand.default, mask, list(shape)))
    # What no place of the mask reads goes to a spare place.
    numbers = builder.op(_aten.where.ScalarOther, flat, _numbers(builder, flat), count)
    room = builder.op(_aten.new_zeros.default, grad, [count + 1])
    summed = builder.op(_aten.index_add.default, room, 0, numbers, _flat(builder, grad))
    own = builder.op(_aten.slice.Tensor, summed, 0, 0, count)
    return [builder.op(_aten.view.default, own, sizes)]


def _flat(builder: Builder, value: Value) -> Value:
    """The elements in their order."""
    rows = builder.op(_aten.clone.default, value, memory_format=torch.contiguous_format)
    return builder.op(_aten.view.default, rows, [value.spec.shape.numel()])


def _numbers(builder: Builder, flat: Value) -> Value:
    """How many places of a mask lie before each."""
    return builder.op(_aten.sub.Scalar, builder.op(_aten.cumsum.default, flat, 0), 1)


TABLE = {
    "masked_scatter": Rule(whole, dealt_out),
    "masked_scatter_backward": Rule(whole, collected),
}
