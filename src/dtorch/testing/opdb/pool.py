"""Operators in parallel, each in a process of its own, which is killed when its time is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..processes import CONTEXT, Process, at_work
from .record import Failure, Record
from .settings import Settings

CASE_NBYTES = 512

Target = Callable[[str, Settings, Any, Any], None]
"""What a process runs: given an operator's name, settings, memory for the case at hand, and the connection for its answer."""


def sweep(names: Sequence[str], settings: Settings, jobs: int, target: Target, done: Callable[[Record], None]) -> None:
    """Run operators, at most ``jobs`` at once.

    Args:
        target: a function of some module, which a server imports once and the processes are forked from.
        done: takes the record of each operator as it is finished.
    """

    def start(left: Sequence[str]) -> _Operator:
        return _Operator(target, left[0], settings)

    for process in at_work(([name] for name in names), start, jobs):
        done(process.record())


class _Operator(Process):
    """An operator's process."""

    def __init__(self, target: Target, name: str, settings: Settings) -> None:
        self.name, self.at = name, CONTEXT.RawArray("c", CASE_NBYTES)
        super().__init__(target, (name, settings, self.at), [name], settings.limit_s)

    def record(self) -> Record:
        """What it sent, or, where it sent nothing, that it crashed or took too long, and where."""
        answer = self.heard()
        if answer is not None:
            return Record.from_json(answer)
        kind = "timeout" if self.status is None else "crash"
        failure = Failure(kind, self.at.value.decode(), self.how)
        return Record(self.name, status=kind, failures=[failure], seconds=self.seconds)
