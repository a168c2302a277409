"""Whether rounding explains a difference: the same plain program, with the last bits of all inexact numbers shaken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .program import LOOK, defined
from .sides import Plain

RUNS = 4
FACTOR = 16.0
"""How much farther than the shaken programs' dtorch's values may be from the plain one's."""
EXACT = {torch.bfloat16: 1 << 8, torch.float32: 1 << 22, torch.complex64: 1 << 22}
"""Integers up to here are not shaken: sums of them are exact."""


def explained(lines: Sequence[str], got: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of those among ``got`` that are farther from the plain program's values than rounding can bring them."""
    right = _run(lines, None)
    shaken = [_run(lines, seed) for seed in range(RUNS)]
    return [name for name, value in got.items() if not _near(value, right[name], [s.get(name) for s in shaken])]


def _near(got: torch.Tensor, right: torch.Tensor, shaken: Sequence[Any]) -> bool:
    others = [s for s in shaken if isinstance(s, torch.Tensor) and s.shape == right.shape]
    distance = max((_distance(s, right) for s in others), default=0.0)
    return _distance(got, right) <= FACTOR * distance


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference; infinite where one is finite or NaN and the other is not."""
    a, b = (torch.view_as_real(t.detach()).double() if t.is_complex() else t.detach().double() for t in (a, b))
    same = (a == b) | (a.isnan() & b.isnan())
    far = torch.where(same, 0.0, (a - b).abs())
    return float(far.nan_to_num(nan=float("inf"), posinf=float("inf")).max()) if far.numel() else 0.0


def _run(lines: Sequence[str], seed: int | None) -> dict[str, Any]:
    side = Plain()
    for number, line in enumerate(lines):
        before = {name: t._version for name, t in side.tensors().items() if t is not None}
        try:
            if line != LOOK:
                side.run(line)
        except Exception:
            # Refused here as it was in the program.
            continue
        if seed is not None:
            _shake_changed(side, before, defined(line), seed * len(lines) + number)
    return side.tensors()


def _shake_changed(side: Plain, before: Mapping[str, int], fresh: Sequence[str], seed: int) -> None:
    for name, tensor in side.tensors().items():
        if tensor is not None and (name in fresh or tensor._version != before.get(name)):
            _shake(tensor, seed)


def _shake(tensor: torch.Tensor, seed: int) -> None:
    """Change every inexact number by a rounding of the largest one, up or down, and the sign of zeros.

    A sum rounds by its largest term, and the sign of a zero depends on the way that a product is computed.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return
    value = tensor.detach()
    signs = torch.randint(0, 2, value.shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    moved = value + (_largest(value) * torch.finfo(value.dtype).eps * signs).to(value.dtype)
    value = torch.where(value == 0, value * signs, value)
    exact = (
        _exact(torch.view_as_real(value.resolve_conj()), value.dtype).all(-1)
        if value.is_complex()
        else _exact(value, value.dtype)
    )
    try:
        # Not a write that autograd would count.
        tensor.data.copy_(torch.where(exact, value, moved))
    except RuntimeError:
        # An expanded tensor can't be written; what it is a view of has been shaken.
        return


def _largest(value: torch.Tensor) -> torch.Tensor:
    return value.abs().nan_to_num(nan=0.0, posinf=0.0).max()


def _exact(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (value == value.round()) & (value.abs() <= EXACT.get(dtype, 1 << 50))
