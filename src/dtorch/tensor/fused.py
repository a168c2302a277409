"""Fused optimizers (``torch._fused_adamw_`` and its kin): one call per parameter, so each may lie on a mesh of its own."""

from __future__ import annotations

from typing import Any

from ..sharding.call import schema_of
from . import dispatch, moving


def is_fused(func: Any) -> bool:
    """Whether the operator is an optimizer's step on lists of parameters, gradients and states."""
    return schema_of(func).name in NAMES


def one_by_one(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Make the step of each parameter, its gradient and state brought to where it lies, and what changed brought back."""
    for i in range(len(args[0])):
        given: list[Any] = [tensors[i] if tensors else None for tensors in args]
        brought = [_beside(cls, t, given[0]) for t in given]
        dispatch.ordinary(cls, func, tuple([] if t is None else [t] for t in brought), kwargs)
        for number, (before, after) in enumerate(zip(given, brought, strict=True)):
            if after is not before and (number != GRADIENT or kwargs.get("grad_scale") is not None):
                before.copy_(after)


def _beside(cls: type, tensor: Any, parameter: Any) -> Any:
    """A tensor of the parameter's shape placed as the parameter; any other one as it is."""
    if not isinstance(tensor, cls) or not isinstance(parameter, cls) or tensor.shape != parameter.shape:  # type: ignore[attr-defined]
        return tensor
    return moving.redistributed(tensor, parameter._spec.mesh, parameter._spec.placements)  # type: ignore[attr-defined]


NAMES = frozenset(f"aten::_fused_{name}_" for name in ("adam", "adamw", "sgd", "adagrad"))
GRADIENT = 1
"""Number of the argument that is read only, unless gradients are scaled."""
