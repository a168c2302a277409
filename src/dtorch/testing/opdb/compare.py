"""How a result differs from the oracle's, by kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ... import Tensor
from ...core.mesh import coordinates

RTOL = {torch.float32: 1e-5, torch.complex64: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 1e-3}
ATOL = {torch.float32: 2e-5, torch.complex64: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
"""A little wider than PyTorch's own tolerances, and by the largest value: a split sum rounds by its largest term."""
EXACT_TOL = 1e-7
"""Of dtypes with more bits."""
NEAR = {torch.bfloat16: 0.1}
NEAR_TOL = 1e-2
"""How far from a judge, by the largest value, plain PyTorch's result may lie for that to judge."""
ROUNDING = 4.0
"""How much farther from the judge dtorch's may lie."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One way in which a result is not the oracle's.

    Attributes:
        kind: ``value``, ``meta`` (structure, shape, dtype or local pieces) or ``layout`` (stride alone).
        text: what was got, and what is right.
    """

    kind: str
    text: str


def differences(got: Any, expected: Any, values: bool = True, where: str = "result", judge: Any = None) -> list[Difference]:
    """Every difference between two results: tensors and plain objects in nested tuples, lists and dicts.

    Args:
        values: whether values are compared, and not only shapes and dtypes.
        judge: the expected result computed with other rounding. Where it is given, what is about as far from it as the
            expected one is counts as equal.
    """
    if isinstance(expected, torch.Tensor):
        return _tensors(got, expected, values, where, judge)
    if isinstance(expected, list | tuple):
        if not isinstance(got, list | tuple) or len(got) != len(expected):
            return [Difference("meta", f"{where}: {_brief(got)}, right is {_brief(expected)}")]
        judges = judge if isinstance(judge, list | tuple) and len(judge) == len(expected) else [None] * len(expected)
        rows = [(*row, f"{where}[{i}]") for i, row in enumerate(zip(got, expected, judges, strict=True))]
    elif isinstance(expected, dict):
        if not isinstance(got, dict) or got.keys() != expected.keys():
            return [Difference("meta", f"{where}: {_brief(got)}, right is {_brief(expected)}")]
        rows = [(got[k], e, None, f"{where}[{k!r}]") for k, e in expected.items()]
    elif isinstance(expected, float | complex) and isinstance(got, float | complex | int):
        return differences(torch.as_tensor(got), torch.as_tensor(expected), values, where)
    else:
        return (
            [] if not values or got == expected else [Difference("value", f"{where}: {_brief(got)}, right is {_brief(expected)}")]
        )
    return [d for g, e, p, at in rows for d in differences(g, e, values, at, p)]


def _tensors(got: Any, expected: torch.Tensor, values: bool, where: str, judge: Any) -> list[Difference]:
    if not isinstance(got, torch.Tensor):
        return [Difference("meta", f"{where}: a {type(got).__name__}, right is a tensor")]
    if (got.shape, got.dtype) != (expected.shape, expected.dtype):
        right = f"{tuple(expected.shape)} {expected.dtype}"
        return [Difference("meta", f"{where}: shape {tuple(got.shape)} {got.dtype}, right is {right}")]
    if expected.layout is not torch.strided:
        return [] if got.layout is expected.layout else [Difference("meta", f"{where}: {got.layout}, right is {expected.layout}")]
    found = _pieces(got, where) if isinstance(got, Tensor) else []
    plain = got.to_torch() if isinstance(got, Tensor) else got.detach()
    if values and not found and not _as_judged(plain, expected.detach(), judge):
        found = _values(plain, expected.detach(), where)
    if _strides(got) != _strides(expected):
        found.append(Difference("layout", f"{where}: stride {got.stride()}, right is {expected.stride()}"))
    return found


def _values(got: torch.Tensor, expected: torch.Tensor, where: str) -> list[Difference]:
    rtol, atol = 0.0, 0.0
    if expected.is_floating_point() or expected.is_complex():
        rtol, atol = RTOL.get(expected.dtype, EXACT_TOL), ATOL.get(expected.dtype, EXACT_TOL) * _scale(expected)
    try:
        torch.testing.assert_close(got, expected, rtol=rtol, atol=atol, equal_nan=True, check_stride=False)
    except AssertionError as error:
        return [Difference("value", f"{where}: {' '.join(str(error).split())}")]
    return []


def _as_judged(got: torch.Tensor, expected: torch.Tensor, judge: Any) -> bool:
    """Whether rounding explains a difference: both lie about as far from the judge, and near it."""
    if not isinstance(judge, torch.Tensor) or judge.shape != expected.shape or not expected.numel():
        return False
    if not (expected.is_floating_point() or expected.is_complex()) or not bool(judge.isfinite().all()):
        return False
    ours, theirs = (float((t.to(judge.dtype) - judge.detach()).abs().max()) for t in (got, expected))
    return theirs < NEAR.get(expected.dtype, NEAR_TOL) * _scale(expected) and ours <= ROUNDING * theirs


def _scale(tensor: torch.Tensor) -> float:
    """The largest finite magnitude, at least 1."""
    finite = tensor[tensor.isfinite()].abs()
    return max(1.0, float(finite.max())) if finite.numel() else 1.0


def _pieces(tensor: Any, where: str) -> list[Difference]:
    """Local tensors must be what the placements say: later operators count on it."""
    for coord, piece in zip(coordinates(tensor.device_mesh.shape), tensor.detach().shards, strict=True):
        if piece.shape != tensor.local_shape(coord) or piece.dtype != tensor.dtype:
            right = f"{tuple(tensor.local_shape(coord))} {tensor.dtype}"
            return [Difference("meta", f"{where}: local {tuple(piece.shape)} {piece.dtype} at {coord}, right is {right}")]
    return []


def _strides(tensor: torch.Tensor) -> list[int]:
    """Strides that matter: those of dims longer than one, of a tensor that has elements."""
    return [s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1] if tensor.numel() else []


def _brief(value: Any) -> str:
    text = f"{len(value)} items" if isinstance(value, list | tuple | dict) else repr(value)
    return f"{type(value).__name__} {text}"[:120]
