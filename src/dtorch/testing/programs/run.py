"""Run a program on both sides and say where they differ."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ... import Tensor
from ..opdb.compare import differences
from .program import LOOK, Program, defined
from .shake import explained
from .sides import Global, Plain

WRONG = "mismatch"
ERROR = "unexpected error"
ACCEPTED = "not refused"
OVERLAPS = "single memory location"
"""PyTorch's word for a write to what is read through another view. Where a piece was copied on the way, nothing overlaps."""
KINDS = (WRONG, ERROR, ACCEPTED)


@dataclass(frozen=True, slots=True)
class Failure:
    """A difference between the sides.

    Attributes:
        kind: ``mismatch``; ``unexpected error`` where plain PyTorch has none; ``not refused`` where it refuses.
        line: number of the line after which it showed.
        text: what was seen.
    """

    kind: str
    line: int
    text: str


@dataclass(slots=True)
class Outcome:
    """What came of a program.

    Attributes:
        failure: the first difference, where there is one.
        ran: lines that ran on both sides.
        refused: lines that both sides refused.
        rounded: tensors that differed by no more than rounding can explain.
        layouts: tensors with the right values under other strides, which is no failure.
    """

    failure: Failure | None = None
    ran: int = 0
    refused: int = 0
    rounded: int = 0
    layouts: int = 0


def run(program: Program) -> Outcome:
    """Run both sides line by line. A line that plain PyTorch refuses must be refused, and the program goes on without it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, ours, outcome = Plain(), Global(program.mesh), Outcome()
        for number, line in enumerate((*program.lines, LOOK)):
            outcome.failure, goes_on = _step(program, number, line, plain, ours, outcome)
            if outcome.failure is not None or not goes_on:
                break
    return outcome


def check(mesh: Sequence[int], text: str) -> None:
    """Run a program on plain PyTorch and on global tensors.

    Args:
        mesh: shape of a CPU mesh.
        text: the program, a statement a line.

    Raises:
        AssertionError: the sides differ.
    """
    program = Program(tuple(mesh), tuple(line.strip() for line in text.strip().splitlines()))
    failure = run(program).failure
    if failure is not None:
        line = (*program.lines, LOOK)[failure.line]
        raise AssertionError(f"{failure.kind} after `{line}`: {failure.text}")


def _step(program: Program, number: int, line: str, plain: Plain, ours: Global, outcome: Outcome) -> tuple[Failure | None, bool]:
    """Run a line; the failure, and whether the program can go on."""
    if line == LOOK:
        return _look(program, number, plain, ours, outcome), True
    expected, error = _attempt(plain, line), _attempt(ours, line)
    if expected is None and error is not None:
        return Failure(ERROR, number, _brief(error)), False
    if expected is None:
        outcome.ran += 1
        return None, True
    outcome.refused += 1
    if error is not None:
        return None, True
    # A refusal by the values themselves may come with the next reading. What a refused write leaves is of no use then.
    late = _read(ours, defined(line) or tuple(ours.tensors()))
    for name in defined(line):
        ours.names.pop(name, None)
    if late is None:
        taken = None if OVERLAPS in str(expected) else Failure(ACCEPTED, number, f"plain PyTorch: {_brief(expected)}")
        return taken, False
    return None, bool(defined(line))


def _attempt(side: Plain, line: str) -> Exception | None:
    try:
        side.run(line)
    except Exception as error:
        return error
    return None


def _read(side: Plain, names: Sequence[str]) -> Exception | None:
    try:
        for name in names:
            value = side.names.get(name)
            if isinstance(value, Tensor):
                value.to_torch()
    except Exception as error:
        return error
    return None


def _look(program: Program, number: int, plain: Plain, ours: Global, outcome: Outcome) -> Failure | None:
    """The first difference among all live tensors."""
    doubtful = []
    for name, expected in plain.tensors().items():
        try:
            found = _compared(ours.names.get(name), expected, name)
        except Exception as error:
            return Failure(ERROR, number, f"reading {name}: {_brief(error)}")
        outcome.layouts += sum(d.kind == "layout" for d in found)
        found = [d for d in found if d.kind != "layout"]
        if any(d.kind != "value" for d in found) or (found and not _rounds(expected)):
            return Failure(WRONG, number, "; ".join(d.text for d in found))
        if found:
            doubtful.append((name, found[0].text))
    if doubtful:
        got = {name: ours.names[name].to_torch() for name, _ in doubtful}
        wrong = explained(program.lines[:number], got)
        outcome.rounded += len(doubtful) - len(wrong)
        if wrong:
            return Failure(WRONG, number, dict(doubtful)[wrong[0]])
    return None


def _compared(got: Any, expected: torch.Tensor | None, name: str) -> list[Any]:
    found = differences(got, expected, where=name)
    if isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor) and got.requires_grad != expected.requires_grad:
        found += differences(got.requires_grad, expected.requires_grad, where=f"{name}.requires_grad")
    return found


def _rounds(tensor: torch.Tensor | None) -> bool:
    return isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.is_complex())


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
