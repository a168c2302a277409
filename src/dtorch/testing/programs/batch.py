"""Some programs in a row, in one session: what a process of the command does."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from ... import shutdown
from .draw import program
from .program import Program, operators
from .rows import ROWS
from .run import KINDS, Failure, run
from .shrink import shrunk

STUCK = "crash or timeout"


class OutOfTime(BaseException):
    """A program took too long. Not an ``Exception``, which would count as a refusal of the line at hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a run is given.

    Attributes:
        seed: of all programs; the n-th program of a seed is always the same.
        shrink: whether failing programs are cut down.
        limit_s: time for one program.
    """

    seed: int = 0
    shrink: bool = True
    limit_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Found:
    """A failing program: its number, kind and text of the failure, and the script that shows it."""

    number: int
    kind: str
    text: str
    script: str


@dataclass(slots=True)
class Report:
    """What came of programs; see ``Outcome`` for the counts."""

    programs: int = 0
    ran: int = 0
    refused: int = 0
    rounded: int = 0
    layouts: int = 0
    seed: int = 0
    operators: Counter[str] = field(default_factory=Counter)
    failures: list[Found] = field(default_factory=list)

    def add(self, other: Report) -> None:
        """Count the programs of another report too."""
        self.programs += other.programs
        self.ran += other.ran
        self.refused += other.refused
        self.rounded += other.rounded
        self.layouts += other.layouts
        self.seed = other.seed
        self.operators.update(other.operators)
        self.failures += other.failures

    def kinds(self) -> dict[str, int]:
        """Number of failures of each kind."""
        counts = Counter(f.kind for f in self.failures)
        return {kind: counts[kind] for kind in (*KINDS, STUCK)}


def numbered(seed: int, number: int) -> Program:
    """The n-th program of a seed."""
    return program(Random(f"{seed} {number}"), ROWS)


def run_batch(numbers: Sequence[int], settings: Settings, at: Any = None) -> Report:
    """Run programs by number.

    Args:
        at: shared number that always holds the program at hand, for when this process dies.
    """
    torch.set_num_threads(1)
    report = Report(seed=settings.seed)
    for number in numbers:
        if at is not None:
            at.value = number
        _run_one(number, settings, report)
    shutdown()
    return report


def _run_one(number: int, settings: Settings, report: Report) -> None:
    drawn = numbered(settings.seed, number)
    report.programs += 1
    try:
        with _limit(settings.limit_s):
            outcome = run(drawn)
    except OutOfTime:
        report.failures.append(Found(number, STUCK, f"no end within {settings.limit_s:.0f} s", drawn.script()))
        return
    report.ran += outcome.ran
    report.refused += outcome.refused
    report.rounded += outcome.rounded
    report.layouts += outcome.layouts
    report.operators.update(name for line in drawn.lines for name in operators(line))
    if outcome.failure is not None:
        report.failures.append(_found(number, drawn, outcome.failure, settings))


def _found(number: int, drawn: Program, failure: Failure, settings: Settings) -> Found:
    if settings.shrink:
        drawn = shrunk(drawn, failure)
        failure = run(drawn).failure or failure
    return Found(number, failure.kind, failure.text, drawn.script())


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in this thread, which is the main one, when time is over."""

    def over(number: int, frame: Any) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
