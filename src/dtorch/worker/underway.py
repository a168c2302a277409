"""Collectives under way: they run in a thread of their own, and what they make is awaited when it is first used.

They run one after the other in the order in which they were issued, as on all workers.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .store import Pending, Pieces, Poison, Store, memory

LATER_NBYTES = 256 << 10
"""Sources from this size on: what is small is done before another thread knows of it."""

MOST_NBYTES = 256 << 20
"""Of sources that may be under way: memory that would be free otherwise."""

Work = Callable[[], list[Pieces]]


class Detached(Exception):
    """Raised by a plan that need not be waited for, before it has done anything.

    Attributes:
        work: what is left to do; gives the outputs.
        sources: values that it reads.
    """

    def __init__(self, work: Work, sources: Sequence[Any]) -> None:
        super().__init__("a plan is to run later")
        self.work, self.sources = work, sources


class Run:
    """One plan under way.

    Args:
        handles: of its outputs.
        fail: makes poison of an error; called once, in whichever thread first asks.
    """

    def __init__(self, detached: Detached, handles: Sequence[int], fail: Callable[[BaseException], Poison]) -> None:
        self.memory = {memory(t) for value in detached.sources if isinstance(value, tuple | list) for t in value}
        # What is made by another is not known yet.
        self.reads_more = any(isinstance(value, Pending) for value in detached.sources)
        self.nbytes = nbytes(detached.sources)
        self._work: Work | None = detached.work
        self._fail: Callable[[BaseException], Poison] | None = fail
        self._done, self._lock = threading.Event(), threading.Lock()
        self._error: BaseException | None = None
        self._poison: Poison | None = None
        self.pending = [Pending(self._settled) for _ in handles]
        # Outputs that nobody has any more are not kept for this.
        self.places = [(handle, weakref.ref(p)) for handle, p in zip(handles, self.pending, strict=True)]

    @property
    def over(self) -> bool:
        """Whether it has run."""
        return self._done.is_set()

    def do(self) -> None:
        """Run it; in the courier's thread."""
        assert self._work is not None
        try:
            for (_, place), pieces in zip(self.places, self._work(), strict=True):
                waiting = place()
                if waiting is not None:
                    waiting.pieces = pieces
                del waiting, pieces
            # It knows the sources, whose memory may be needed now.
            self._fail = None
        except BaseException as error:
            self._error = error
        self._work = None
        self._done.set()

    def wait(self) -> None:
        """Wait until it has run."""
        self._done.wait()

    def poison(self) -> Poison | None:
        """What stands for its outputs where it has failed."""
        self.wait()
        with self._lock:
            if self._error is not None and self._fail is not None:
                self._poison = self._fail(self._error)
                self._error = self._fail = None
        return self._poison

    def _settled(self, pending: Pending) -> Pieces | Poison:
        return self.poison() or pending.pieces


class Courier:
    """The thread that runs what is under way, started with the first of it. Its owner calls ``close``."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Run | None] = queue.SimpleQueue()
        self._runs: deque[Run] = deque()
        self._thread: threading.Thread | None = None

    def start(self, run: Run, store: Store) -> None:
        """Let a plan run, and store what stands for its outputs; waits while too much is under way."""
        while self._runs and (self._runs[0].over or sum(r.nbytes for r in self._runs) + run.nbytes > MOST_NBYTES):
            self._settle(store)
        for (handle, _), pending in zip(run.places, run.pending, strict=True):
            store[handle] = pending  # type: ignore[assignment]
        run.pending.clear()
        self._runs.append(run)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="dtorch-courier", daemon=True)
            self._thread.start()
        self._queue.put(run)

    def drain(self) -> None:
        """Wait until nothing is under way."""
        if self._runs:
            self._runs[-1].wait()

    def settle(self, store: Store) -> None:
        """Let all values be there, and all failures be known."""
        while self._runs:
            self._settle(store)

    def release(self, pieces: Iterable[Any]) -> None:
        """Wait until nothing that is under way reads the memory of pieces."""
        wanted = {memory(t) for t in pieces}
        for run in self._runs:
            if run.reads_more or run.memory & wanted:
                run.wait()

    @property
    def busy(self) -> bool:
        """Whether anything may be under way."""
        return bool(self._runs)

    def close(self) -> None:
        """End the thread, once it has done what is under way."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _settle(self, store: Store) -> None:
        """Take leave of the first."""
        run = self._runs.popleft()
        run.poison()
        for handle, place in run.places:
            pending = place()
            if pending is not None and store.get(handle) is pending:
                store[handle] = pending.settled()

    def _work(self) -> None:
        with torch.no_grad():
            while (run := self._queue.get()) is not None:
                run.do()
                del run


def nbytes(values: Sequence[Any]) -> int:
    """Bytes of the pieces of values; one that is under way itself counts as large, one that is missing for nothing."""
    return sum(
        LATER_NBYTES if isinstance(value, Pending) else sum(t.nbytes for t in value if isinstance(t, Tensor))
        for value in values
        if value is not None and not isinstance(value, Poison)
    )
