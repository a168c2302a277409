"""The database's samples of an operator, made so that they can be placed."""

from __future__ import annotations

from typing import Any

import torch

from ...sharding.call import leaves
from .placements import dense
from .variants import Sample


def dtypes_of(op: Any, main: tuple[torch.dtype, ...], others: tuple[torch.dtype, ...]) -> list[tuple[torch.dtype, bool]]:
    """The dtypes an operator is tried with, each with whether it is the main one."""
    taken = op.supported_dtypes("cpu")
    first = next((d for d in main if d in taken), None)
    return [] if first is None else [(first, True), *((d, False) for d in others if d in taken and d is not first)]


def samples_of(op: Any, dtype: torch.dtype, seed: int) -> list[Sample | None]:
    """Every default sample of a dtype; None for one that holds sparse tensors.

    Raises:
        Whatever the database's own code raises.
    """
    torch.manual_seed(seed)
    differentiable = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    return [_sample(s) for s in op.sample_inputs("cpu", dtype, requires_grad=differentiable)]


def chosen(count: int, limit: int | None) -> list[int]:
    """Numbers of ``limit`` of ``count`` samples, evenly spread; all of them without a limit."""
    if limit is None or limit >= count:
        return list(range(count))
    return sorted({i * count // limit for i in range(limit)})


def _sample(given: Any) -> Sample | None:
    tree = (given.input, tuple(given.args), dict(given.kwargs))
    tensors: list[torch.Tensor] = []
    numbers: dict[int, int] = {}
    for t in leaves(tree, torch.Tensor):
        if t.layout is not torch.strided:
            return None
        if id(t) not in numbers:
            numbers[id(t)] = len(tensors)
            tensors.append(t)
    marked = [t.requires_grad for t in tensors]
    plain = [dense(t.detach().resolve_conj().resolve_neg()) for t in tensors]
    return Sample(tree, plain, numbers, marked, given.output_process_fn_grad, given.broadcasts_input)
