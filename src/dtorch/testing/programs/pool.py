"""Batches of programs in parallel, each in a process of its own, so that memory stays bounded and a crash costs one batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..processes import CONTEXT, Process, at_work
from .batch import STUCK, Found, Report, Settings, numbered, run_batch

SIZE = 200
"""Programs of one process."""


def batches(numbers: Sequence[int], settings: Settings, jobs: int) -> Iterator[Report]:
    """Run programs by number, at most ``jobs`` processes at once, and give a report of each batch as it is done."""

    def start(left: Sequence[int]) -> _Batch:
        return _Batch(list(left), settings)

    pieces = (numbers[i : i + SIZE] for i in range(0, len(numbers), SIZE))
    for process in at_work(pieces, start, jobs):
        yield process.report()


class _Batch(Process):
    """A batch's process. All its programs are answered by one report, those that it came to."""

    def __init__(self, numbers: Sequence[int], settings: Settings) -> None:
        self.settings, self.at = settings, CONTEXT.RawValue("q", numbers[0])
        super().__init__(_main, (numbers, settings, self.at), [numbers])

    def report(self) -> Report:
        """What it sent; where it died, that, and the programs that it did not come to are left."""
        numbers = self.left[0]
        report = self.heard()
        if report is not None:
            return report
        number, seed = self.at.value, self.settings.seed
        found = Found(number, STUCK, self.how, numbered(seed, number).script())
        done = number - numbers[0] + 1
        self.left.extend(numbers[done:])
        return Report(programs=done, seed=seed, failures=[found])


def _main(numbers: Sequence[int], settings: Settings, at: Any, answer: Any) -> None:
    answer.send(run_batch(numbers, settings, at))
    answer.close()
