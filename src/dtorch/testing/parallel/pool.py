"""Cells in processes: each takes some of one model in a row, and is killed where one takes too long."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch

from ..processes import Process, at_work
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

    def start(left: Sequence[Cell]) -> Process:
        return Process(target, (list(left),), left, limit_s)

    for process in at_work(_bunches(cells), start, jobs):
        cell = str(process.left[0])
        yield process.heard() or Record(cell, FAILED, process.how)


def _bunches(cells: Iterable[Cell]) -> Iterator[list[Cell]]:
    """Cells of one model, those of equal inputs next to each other: what plain PyTorch answers is computed once."""
    order = sorted(cells, key=lambda c: (c.model, c.inputs()))
    for _, group in groupby(order, lambda c: c.model):
        alike = list(group)
        yield from (alike[i : i + SIZE] for i in range(0, len(alike), SIZE))
