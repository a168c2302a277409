"""What the drawing of programs asks of plain tensors: which memory they lie in, and whether their numbers are exact."""

from __future__ import annotations

from collections.abc import Sequence

import torch

LIMITS = {torch.bfloat16: 1 << 8, torch.float32: 1 << 23, torch.complex64: 1 << 21}
"""Integers up to here are exact, with a margin."""


def of(tensor: torch.Tensor) -> int:
    """A number of the memory that a tensor shares with its views."""
    return tensor.untyped_storage()._cdata


def is_float(tensor: torch.Tensor) -> bool:
    """Whether its numbers can be rounded."""
    return tensor.is_floating_point() or tensor.is_complex()


def _real(tensor: torch.Tensor) -> torch.Tensor:
    value = tensor.detach()
    return torch.view_as_real(value.resolve_conj()).double() if value.is_complex() else value.double()


def small_integers(tensor: torch.Tensor) -> bool:
    """Whether all its numbers are integers that its dtype holds exactly, and not NaN."""
    value = _real(tensor)
    return bool(((value == value.round()) & (value.abs() <= LIMITS.get(tensor.dtype, 1 << 50))).all())


def sums_exactly(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether sums of products of these are exact, however they are split."""
    floats = [t for t in tensors if is_float(t)]
    bound = 1.0
    for t in tensors:
        bound *= max(1.0, float(_real(t).abs().sum()))
    return all(bound <= LIMITS.get(t.dtype, 1 << 50) for t in floats)


def largest(tensor: torch.Tensor) -> float:
    """The largest magnitude; 0 without elements, infinite where one is not finite."""
    if not tensor.numel():
        return 0.0
    return float(_real(tensor).abs().max().nan_to_num(nan=float("inf"), posinf=float("inf")))


def addresses(tensor: torch.Tensor) -> list[int]:
    """Places of its elements in their memory, in elements."""
    where = torch.tensor(tensor.storage_offset())
    for d, (n, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        where = where.unsqueeze(-1) + (torch.arange(n) * step).view(*(1,) * (d + 0), n)
    return where.flatten().tolist()


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two of its elements are one."""
    places = addresses(tensor)
    return len(set(places)) < len(places)


def collide(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a write to one changes the other in places other than its own: what comes out is not defined then."""
    if of(a) != of(b):
        return False
    mine, others = addresses(a), addresses(b)
    return mine != others and not set(mine).isdisjoint(others)
