"""A partial tensor that several operators need whole is reduced once: the tensor remembers its reduced form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..core.spec import Spec
from ..sharding.call import leaves, replace_leaves
from . import moving


def settled_args(
    settles: Sequence[tuple[int, Spec]], written: Sequence[Any], args: tuple, kwargs: dict[str, Any], operator: str
) -> tuple[tuple, dict[str, Any]] | None:
    """Arguments with each partial tensor that the plan reduces in its reduced form; None where there is none to replace.

    Args:
        settles: input number and reduced spec of each.
        written: tensors that the operator writes, which stay themselves.
        operator: name that the report gives as the reason.
    """
    tensors = leaves((args, kwargs), torch.Tensor)
    reduced = {
        id(tensors[number]): settled(tensors[number], spec, operator)
        for number, spec in settles
        if not any(tensors[number] is w for w in written)
    }
    if not reduced:
        return None
    return replace_leaves((args, kwargs), torch.Tensor, lambda t: reduced.get(id(t), t))


def settled(tensor: Any, spec: Spec, operator: str) -> Any:
    """The tensor reduced to ``spec``, as remembered since its last write."""
    value = tensor._value
    version = 0 if value.group is None else value.group.version
    known = value.settled
    if known is None or known[0] != version or known[1]._spec is not spec:
        known = value.settled = (version, moving.move(tensor, spec, explicit=False, reason=operator))
    return known[1]
