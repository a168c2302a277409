"""Embedding tables split by rows: their gradients are split alike.

The backward operator is told how many rows a table has, not how it lies. Whole, the gradient of a large vocabulary would
be larger than all else on a device. So the last placement of a table of each size is remembered; it only says where a
gradient should lie, never what it is.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..core.mesh import DeviceMesh
from ..core.placements import Placements, Shard
from ..core.spec import Spec
from ..sharding.builder import Builder
from ..sharding.plan import Plan
from ..sharding.planner import plan_into
from ..sharding.rules.embedding import can_split, split_gradient
from . import dispatch, moving

_aten = torch.ops.aten
_split: WeakKeyDictionary[DeviceMesh, dict[tuple[int, ...], Placements]] = WeakKeyDictionary()


def embedding(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Look up as any operator, and remember how the table lies."""
    table = getattr(args[0], "_spec", None)
    if table is not None:
        known = _split.setdefault(table.mesh, {})
        if any(isinstance(p, Shard) and p.dim == 0 and a in table.axes for a, p in enumerate(table.placements)):
            known[tuple(table.shape)] = table.placements
        else:
            known.pop(tuple(table.shape), None)
    return dispatch.ordinary(cls, func, args, kwargs)


def dense_backward(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The table's gradient, split as the table is where each piece can find its part."""
    table = None if kwargs else _table(cls, *args)
    if table is None:
        return dispatch.ordinary(cls, func, args, kwargs)
    grad, numbers, _, padding, _ = args
    specs = [grad._spec, numbers._spec]

    def make() -> Plan:
        builder = Builder("aten::embedding_dense_backward.default", specs, plan_into)
        out = split_gradient(builder, builder.inputs[0], builder.inputs[1], table, padding)
        return Plan(builder.define([out]), (out.spec,), ..., tuple(builder.comms), "program", table.mesh, False)

    return moving.run_plan(("split gradient", *specs, table, padding), make, [grad, numbers])[0]


def _table(cls: Any, grad: Any, numbers: Any, count: int, padding: int, scaled: bool) -> Spec | None:
    """The split table of this size that the numbers were looked up in, if its gradient can be split."""
    if type(grad) is not cls or type(numbers) is not cls or grad._spec.mesh is not numbers._spec.mesh or scaled:
        return None
    mesh, shape = grad._spec.mesh, (count, grad.shape[-1])
    placements = _split.get(mesh, {}).get(shape)
    table = None if placements is None else Spec.make(mesh, placements, shape, grad.dtype)
    return table if table is not None and can_split(grad._spec, numbers._spec, table) else None


HANDLERS = {_aten.embedding.default: embedding, _aten.embedding_dense_backward.default: dense_backward}
