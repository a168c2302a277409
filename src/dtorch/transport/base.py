"""The seam between those who send instructions and those who run them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..core.program import Instruction, PendingReply, Reply


class Runner(Protocol):
    """Runs batches: a worker's executor, or a fake in a test."""

    def submit(self, first: int, batch: list[Instruction]) -> None:
        """Run a batch; failures of operators wait for the next ``run``."""

    def run(self, first: int, batch: list[Instruction]) -> Reply:
        """Run a batch and answer its last instruction."""

    def close(self) -> None:
        """Release everything."""


class Transport(Protocol):
    """Carries batches to one runner, in order."""

    def submit(self, first: int, batch: list[Instruction]) -> None:
        """Send a batch; may wait for credit when the runner is behind."""

    def request(self, first: int, batch: list[Instruction]) -> PendingReply:
        """Send a batch whose last instruction is answered."""

    def close(self) -> None:
        """Let what was sent finish, then end; a second call does nothing."""


Part = tuple[Sequence[int], list[Instruction]]
"""Workers, and what of a batch is for them."""


class Network(Protocol):
    """Carries batches to the workers of a session, which are numbered from 0. All of them have a part in each batch."""

    def submit(self, first: int, parts: Sequence[Part]) -> None:
        """Send a batch; may wait for credit when workers are behind."""

    def request(self, first: int, parts: Sequence[Part]) -> list[PendingReply]:
        """Send a batch whose last instruction each of them answers."""

    def close(self) -> None:
        """Let what was sent finish, then end; a second call does nothing."""


class Each:
    """A ``Network`` of one transport to each worker."""

    def __init__(self, *transports: Transport) -> None:
        self.transports = transports

    def submit(self, first: int, parts: Sequence[Part]) -> None:
        """Send a batch."""
        for workers, batch in parts:
            for worker in workers:
                self.transports[worker].submit(first, batch)

    def request(self, first: int, parts: Sequence[Part]) -> list[PendingReply]:
        """Send a batch whose last instruction is answered."""
        return [self.transports[worker].request(first, batch) for workers, batch in parts for worker in workers]

    def close(self) -> None:
        """Close all."""
        for transport in self.transports:
            transport.close()


class Finished:
    """A reply that is there already."""

    __slots__ = ("_reply",)

    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    def done(self) -> bool:
        """True."""
        return True

    def result(self, timeout: float | None = None) -> Reply:
        """The reply, at once."""
        return self._reply

    def add_done_callback(self, fn: Any) -> None:
        """Call ``fn(self)`` at once."""
        fn(self)
