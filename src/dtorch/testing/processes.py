"""Pieces of work in processes of their own, some at once: one that dies or takes too long costs one piece."""

from __future__ import annotations

import math
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import wait
from typing import Any, TypeVar

CONTEXT: Any = multiprocessing.get_context("forkserver")
ENDING_S = 10.0
"""How long a process that has answered may take to end."""


class Process:
    """A process at work. Its owner calls ``end``.

    Args:
        target: a function of some module, which a server imports once and the processes are forked from; the last argument
            that it gets is a connection for its answers.
        limit_s: time for an answer.

    Attributes:
        left: what it has still to answer, the one at hand first; what is left when it is over goes to another process.
        over: it will answer no more.
        status: its exit status, where it died.
    """

    def __init__(self, target: Callable[..., None], args: Sequence[Any], left: Sequence[Any], limit_s: float = math.inf) -> None:
        self.left, self.limit_s = deque(left), limit_s
        self.over, self.status = False, None
        CONTEXT.set_forkserver_preload([target.__module__])
        self.answer, theirs = CONTEXT.Pipe(duplex=False)
        self._process = CONTEXT.Process(target=target, args=(*args, theirs), daemon=True)
        # Returns when the server has imported what it forks from, which may take long.
        self._process.start()
        self.began = time.monotonic()
        self.deadline = self.began + limit_s
        theirs.close()

    @property
    def late(self) -> bool:
        """Whether the time for the next answer is over."""
        return time.monotonic() >= self.deadline

    def heard(self) -> Any:
        """Its next answer; None where it died or is late. The one at hand of what is left is answered by either."""
        try:
            if self.answer.poll():
                answer = self.answer.recv()
                self.left.popleft()
                self.over, self.deadline = not self.left, time.monotonic() + self.limit_s
                return answer
        except EOFError:
            self._process.join()
            self.status = self._process.exitcode
        self.left.popleft()
        self.over = True
        return None

    @property
    def seconds(self) -> float:
        """How long it has been at work."""
        return time.monotonic() - self.began

    @property
    def how(self) -> str:
        """How it came to be over without an answer."""
        return f"no end within {self.limit_s:.0f} s" if self.status is None else f"the process ended with {self.status}"

    def end(self) -> None:
        """Give it time to end where it has answered all, kill it if it still runs, and take leave of it."""
        if self.over and not self.late:
            self._process.join(ENDING_S)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self.answer.close()


At = TypeVar("At", bound=Process)
Work = TypeVar("Work")


def at_work(pieces: Iterable[Work], start: Callable[[Any], At], jobs: int) -> Iterator[At]:
    """Run work, at most ``jobs`` processes at once; gives each that has answered, died or is late, whose user calls ``heard``.

    Args:
        pieces: of work, each for one process.
        start: begins a process with a piece, or with what another left of one.
    """
    waiting: deque[Any] = deque(pieces)
    running: dict[Any, At] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                started = start(waiting.popleft())
                running[started.answer] = started
            until = min(p.deadline for p in running.values())
            ready = wait(list(running), None if until == math.inf else max(0.0, until - time.monotonic()))
            for answer in [*ready, *(a for a, p in running.items() if a not in ready and p.late)]:
                yield running[answer]
                if running[answer].over:
                    ended = running.pop(answer)
                    ended.end()
                    if ended.left:
                        waiting.appendleft(ended.left)
    finally:
        for left in running.values():
            left.end()
