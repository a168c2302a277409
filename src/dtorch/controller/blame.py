"""Whose fault it is: from what failed for want of what another worker should have given, to what failed first."""

from __future__ import annotations

from typing import TypeVar

from ..core.program import Failure, Reply

REMEMBERED = 4096
"""Failures, and calls that had nothing to give, that are remembered."""

At = tuple[int, int]
"""A worker, and a position in the stream."""

Value = TypeVar("Value")


class Blame:
    """What workers have told of failures. Every failure has been told when one that it caused is asked about."""

    def __init__(self) -> None:
        self._failed: dict[At, Failure] = {}
        self._why: dict[At, At] = {}

    def hear(self, worker: int, reply: Reply) -> None:
        """Note what a worker's reply tells; the same again changes nothing."""
        for failure in reply.failures:
            if not failure.caused:
                _note(self._failed, (worker, failure.sequence), failure)
        for sequence, other, before in reply.silent:
            _note(self._why, (worker, sequence), (other, before))

    def first(self, failure: Failure) -> Failure:
        """What a failure goes back to; the failure itself where that is no longer known."""
        at = failure.cause, failure.sequence
        seen: set[At] = set()
        while at in self._why and at not in seen:
            seen.add(at)
            at = self._why[at]
        return self._failed.get(at, failure)


def _note(known: dict[At, Value], at: At, value: Value) -> None:
    known.setdefault(at, value)
    if len(known) > REMEMBERED:
        del known[next(iter(known))]
