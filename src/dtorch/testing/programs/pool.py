"""Batches of programs in parallel, each in a process of its own, so that memory stays bounded and a crash costs one batch."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from typing import Any

from .batch import STUCK, Found, Report, Settings, numbered, run_batch

SIZE = 200
"""Programs of one process."""


def batches(numbers: Sequence[int], settings: Settings, jobs: int) -> Iterator[Report]:
    """Run programs by number, at most ``jobs`` processes at once, and give a report of each batch as it is done."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    waiting = deque(numbers[i : i + SIZE] for i in range(0, len(numbers), SIZE))
    running: dict[Any, _Running] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                started = _Running(context, waiting.popleft(), settings)
                running[started.answer] = started
            for answer in wait(list(running)):
                done = running.pop(answer)
                report, rest = done.finished()
                if rest:
                    waiting.appendleft(rest)
                yield report
    finally:
        for left in running.values():
            left.end()


class _Running:
    """A batch's process. Its owner calls ``finished`` or ``end``."""

    def __init__(self, context: Any, numbers: Sequence[int], settings: Settings) -> None:
        self.numbers, self.settings = numbers, settings
        self.at = context.RawValue("q", numbers[0])
        self.answer, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_main, args=(numbers, settings, theirs, self.at), daemon=True)
        self.process.start()
        theirs.close()

    def finished(self) -> tuple[Report, Sequence[int]]:
        """Its report, and the programs that it did not come to: those after the one at which its process ended."""
        try:
            return self.answer.recv(), ()
        except EOFError:
            self.process.join()
            number, seed = self.at.value, self.settings.seed
            text = f"the process ended with {self.process.exitcode}"
            found = Found(number, STUCK, text, numbered(seed, number).script())
            done = number - self.numbers[0] + 1
            return Report(programs=done, seed=seed, failures=[found]), self.numbers[done:]
        finally:
            self.end()

    def end(self) -> None:
        """Kill the process if it still runs, and take leave of it."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.answer.close()


def _main(numbers: Sequence[int], settings: Settings, answer: Any, at: Any) -> None:
    answer.send(run_batch(numbers, settings, at))
    answer.close()
