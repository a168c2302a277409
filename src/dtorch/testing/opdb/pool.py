"""Operators in parallel, each in a process of its own, which is killed when its time is over."""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

from .record import Failure, Record
from .settings import Settings

CASE_NBYTES = 512
ENDING_S = 10.0
"""How long a process that has answered may take to end."""

Target = Callable[[str, Settings, Any, Any], None]
"""What a process runs: given an operator's name, settings, the connection for its answer, and memory for the case at hand."""


def sweep(names: Sequence[str], settings: Settings, jobs: int, target: Target, done: Callable[[Record], None]) -> None:
    """Run operators, at most ``jobs`` at once.

    Args:
        target: a function of some module, which a server imports once and the processes are forked from.
        done: takes the record of each operator as it is finished.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([target.__module__])
    waiting = deque(names)
    running: dict[Any, _Running] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                started = _Running(context, target, waiting.popleft(), settings)
                running[started.answer] = started
            until = min(r.deadline for r in running.values())
            ready = wait(list(running), max(0.0, until - time.monotonic()))
            for answer in [*ready, *(a for a, r in running.items() if a not in ready and r.late)]:
                done(running.pop(answer).finished())
    finally:
        for left in running.values():
            left.end()


class _Running:
    """An operator's process. Its owner calls ``finished`` or ``end``."""

    def __init__(self, context: Any, target: Target, name: str, settings: Settings) -> None:
        self.name, self.began = name, time.monotonic()
        self.deadline = self.began + settings.limit_s
        self.at = context.RawArray("c", CASE_NBYTES)
        self.answer, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=target, args=(name, settings, theirs, self.at), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def late(self) -> bool:
        """Whether its time is over."""
        return time.monotonic() >= self.deadline

    def finished(self) -> Record:
        """Its record: what it sent, or, where it sent nothing, that it crashed or took too long, and where."""
        seconds = time.monotonic() - self.began
        try:
            record = Record.from_json(self.answer.recv()) if self.answer.poll() else None
        except EOFError:
            record = None
        late = self.late
        if not late:
            self.process.join(ENDING_S)
        self.end()
        if record is not None:
            return record
        status = "timeout" if late else "crash"
        text = f"no answer within {seconds:.0f} s" if late else f"the process ended with {self.process.exitcode}"
        failure = Failure(status, self.at.value.decode(), text)
        return Record(self.name, status=status, failures=[failure], seconds=seconds)

    def end(self) -> None:
        """Kill the process if it still runs, and take leave of it."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.answer.close()
