"""PyTorch's own decompositions, for operators that have no rule here: their parts have.

A decomposition runs on the global tensors, part by part, so numbers it derives from shapes are global ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ..sharding.call import is_view, leaves, returns_written, written_args
from ..sharding.plan import Plan


@cache
def decomposition_of(func: Any) -> Callable[..., Any] | None:
    """How PyTorch computes an operator by others, or None. Operators that write, share memory or draw are left out."""
    if written_args(func) or returns_written(func) or is_view(func) or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    return torch._decomp.decomposition_table.get(func)


def decomposed(plan: Plan, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The operator by its parts; None where it has none, or where they do not give what the operator gives.

    Args:
        plan: the operator's replicated plan, which tells what it gives.
    """
    decomposition = decomposition_of(func)
    if decomposition is None or not plan.comms:
        return None
    result = decomposition(*args, **kwargs)
    made = leaves(result, torch.Tensor)
    same = [(t.shape, t.dtype) for t in made] == [(s.shape, s.dtype) for s in plan.outs]
    return result if same and all(hasattr(t, "_spec") for t in made) else None
