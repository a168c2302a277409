"""Fakes of a worker, for tests of transports."""

from __future__ import annotations

import threading

from dtorch.core.program import Fetch, Instruction, Reply


class Recorder:
    """Notes what it is asked, and answers every Fetch with its handle and the batch's number."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, list[Instruction]]] = []
        self.threads: set[int] = set()
        self.closed = 0

    def submit(self, first: int, batch: list[Instruction]) -> None:
        assert not self.closed
        self.threads.add(threading.get_ident())
        self.batches.append((first, batch))

    def run(self, first: int, batch: list[Instruction]) -> Reply:
        self.submit(first, batch)
        last = batch[-1]
        assert isinstance(last, Fetch)
        return Reply([last.handle, len(self.batches)])

    def close(self) -> None:
        self.closed += 1


class Broken(Recorder):
    """A worker whose own machinery fails."""

    def submit(self, first: int, batch: list[Instruction]) -> None:
        super().submit(first, batch)
        raise OSError("the machine is on fire")


class Gated(Recorder):
    """A worker that waits until its gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def submit(self, first: int, batch: list[Instruction]) -> None:
        assert self.gate.wait(30)
        super().submit(first, batch)
