"""Timing two sides in turn, so that what else the machine does meets both."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Work = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One run: seconds on the clock, and seconds of processor time of all threads."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Runs of two sides, pair by pair."""

    base: Sequence[Sample]
    other: Sequence[Sample]

    @property
    def ratios(self) -> list[float]:
        """Other to base by the clock, a pair each."""
        return [o.wall_s / b.wall_s for b, o in zip(self.base, self.other, strict=True)]

    @property
    def ratio(self) -> float:
        """The median of the ratios."""
        return statistics.median(self.ratios)

    @property
    def cpu_ratio(self) -> float:
        """The median of the ratios of processor time: what other programs take of the machine hardly shows in it."""
        return statistics.median(o.cpu_s / b.cpu_s for b, o in zip(self.base, self.other, strict=True))

    @property
    def spread(self) -> tuple[float, float]:
        """The middle half of the ratios."""
        return middle_half(self.ratios)

    def times(self, unit: float, name: str, runs: int = 1) -> str:
        """Both medians by the clock, divided by ``runs``, in a unit of so many seconds."""
        base, other = (statistics.median(s.wall_s for s in side) / runs / unit for side in (self.base, self.other))
        return f"{base:.4g} {name} -> {other:.4g} {name}"


def paired(base: Work, other: Work, pairs: int) -> Pairs:
    """Time two sides in turn, each first in every second pair. Neither is warmed up here."""
    sides: tuple[list[Sample], list[Sample]] = ([], [])
    # Earlier rubbish is nobody's here. The collector stays on meanwhile, as in a user's program.
    gc.collect()
    for number in range(pairs):
        order = ((base, sides[0]), (other, sides[1]))
        for work, samples in order if number % 2 == 0 else reversed(order):
            samples.append(clocked(work))
    return Pairs(base=sides[0], other=sides[1])


def clocked(work: Work) -> Sample:
    """Time one run."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return Sample(wall_s=time.perf_counter() - wall, cpu_s=time.process_time() - cpu)


def middle_half(values: Sequence[float]) -> tuple[float, float]:
    """First and third quartile."""
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third
