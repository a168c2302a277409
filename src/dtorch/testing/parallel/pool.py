"""Cells in processes: each takes some of one model in a row, and is killed where one takes too long."""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from multiprocessing.connection import wait
from typing import Any

import torch

from .cell import Cell
from .record import FAILED, Record
from .run import run_cell
from .zoo import be_quiet

SIZE = 25
"""Cells of one process, so that memory stays bounded."""

Target = Callable[[Sequence[Cell], Any], None]
"""What a process runs: given cells, and a connection that takes the record of each as it is done."""


def main(cells: Sequence[Cell], answer: Any) -> None:
    """Run cells one after another and send their records."""
    torch.set_num_threads(1)
    be_quiet()
    for cell in cells:
        answer.send(run_cell(cell))
    answer.close()


def records(cells: Iterable[Cell], jobs: int, limit_s: float, target: Target = main) -> Iterator[Record]:
    """Run cells, at most ``jobs`` processes at once, and give the record of each as it is done.

    Args:
        limit_s: time for one cell; the first of a process needs some to load the model, too.
        target: a function of some module, which a server imports once and the processes are forked from.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([target.__module__])
    waiting = deque(_bunches(cells))
    running: dict[Any, _Running] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                started = _Running(context, target, waiting.popleft(), limit_s)
                running[started.answer] = started
            until = min(r.deadline for r in running.values())
            ready = wait(list(running), max(0.0, until - time.monotonic()))
            for answer in [*ready, *(a for a, r in running.items() if a not in ready and r.late)]:
                yield running[answer].next()
                if running[answer].over:
                    ended = running.pop(answer)
                    ended.end()
                    if ended.cells:
                        waiting.appendleft(list(ended.cells))
    finally:
        for left in running.values():
            left.end()


def _bunches(cells: Iterable[Cell]) -> Iterator[list[Cell]]:
    """Cells of one model, those of equal inputs next to each other: what plain PyTorch answers is computed once."""
    order = sorted(cells, key=lambda c: (c.model, c.inputs()))
    for _, group in groupby(order, lambda c: c.model):
        alike = list(group)
        yield from (alike[i : i + SIZE] for i in range(0, len(alike), SIZE))


class _Running:
    """A process with the cells that it has still to do, the one at hand first. Its owner calls ``end``.

    Attributes:
        over: it will send no more.
    """

    def __init__(self, context: Any, target: Target, cells: Sequence[Cell], limit_s: float) -> None:
        self.cells, self.limit_s, self.over = deque(cells), limit_s, False
        self.answer, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=target, args=(cells, theirs), daemon=True)
        # Returns when the server has imported what it forks from, which may take long.
        self.process.start()
        self.deadline = time.monotonic() + limit_s
        theirs.close()

    @property
    def late(self) -> bool:
        """Whether the time of the cell at hand is over."""
        return time.monotonic() >= self.deadline

    def next(self) -> Record:
        """The record of the cell at hand: what was sent, or that its process ended or took too long."""
        cell = str(self.cells.popleft())
        try:
            if self.answer.poll():
                record = self.answer.recv()
                self.over, self.deadline = not self.cells, time.monotonic() + self.limit_s
                return record
            text = f"no end within {self.limit_s:.0f} s"
        except EOFError:
            self.process.join()
            text = f"the process ended with {self.process.exitcode}"
        self.over = True
        return Record(cell, FAILED, text)

    def end(self) -> None:
        """Kill the process if it still runs, and take leave of it."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.answer.close()
