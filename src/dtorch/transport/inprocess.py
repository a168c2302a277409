"""A transport within one process: batches run at once, in the caller's own thread."""

from __future__ import annotations

from ..core.program import Instruction, PendingReply
from .base import Finished, Runner


class InlineTransport:
    """Runs every batch at once in the calling thread.

    Args:
        runner: the worker; closed with the transport.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def submit(self, first: int, batch: list[Instruction]) -> None:
        """Run a batch."""
        self._runner.submit(first, batch)

    def request(self, first: int, batch: list[Instruction]) -> PendingReply:
        """Run a batch; the reply is finished."""
        return Finished(self._runner.run(first, batch))

    def close(self) -> None:
        """Close the runner."""
        self._runner.close()
