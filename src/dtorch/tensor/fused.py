"""Fused optimizers (``torch._fused_adamw_`` and its kin): one call per parameter, so each may lie on a mesh of its own."""

from __future__ import annotations

from typing import Any

from ..sharding.call import schema_of
from . import dispatch, moving


def is_fused(func: Any) -> bool:
    """Whether the operator is an optimizer's step on lists of parameters, gradients and states."""
    return schema_of(func).name in NAMES


def one_by_one(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Make the step of each parameter, its gradient brought to where it lies."""
    for i, parameter in enumerate(args[0]):
        row = [[given[i]] if given else [] for given in args]
        grad = args[1][i]
        if isinstance(parameter, cls) and isinstance(grad, cls):
            row[1] = [moving.redistributed(grad, parameter._spec.mesh, parameter._spec.placements)]  # type: ignore[attr-defined]
        dispatch.ordinary(cls, func, tuple(row), kwargs)
        if row[1][0] is not grad and kwargs.get("grad_scale") is not None:
            grad.copy_(row[1][0])


NAMES = frozenset(f"aten::_fused_{name}_" for name in ("adam", "adamw", "sgd", "adagrad"))
