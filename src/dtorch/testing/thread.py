"""A worker in a thread of its own, for tests of order and of waiting without a process.

PyTorch has one default dtype and one random generator for the whole process, so neither is to be changed while a batch runs.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future

from ..core.errors import InternalError
from ..core.program import Instruction, PendingReply, Reply
from ..transport.base import Runner

CREDITS = 64
"""Batches that may wait before ``submit`` does, so that a slow worker bounds the client's memory."""

CLOSE_TIMEOUT_S = 60.0
"""How long ``close`` waits for batches that were sent."""

_Item = tuple[int, list[Instruction], "Future[Reply] | None"]


class ThreadTransport:
    """Runs batches in order in a thread of its own.

    Callbacks of replies run in that thread and must not send batches, which could wait for the thread itself.

    Args:
        runner: the worker; used by the thread only, and closed by it at the end.
        credits: batches that may wait before ``submit`` blocks.
        close_timeout_s: how long ``close`` waits.
    """

    def __init__(self, runner: Runner, credits: int = CREDITS, close_timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        self._runner = runner
        self._items: queue.Queue[_Item | None] = queue.Queue(credits)
        self._close_timeout_s = close_timeout_s
        self._broken: BaseException | None = None
        self._closed = False
        # A daemon, so that a program which never closes its session can still end.
        self._thread = threading.Thread(target=self._work, name="dtorch-worker", daemon=True)
        self._thread.start()

    def submit(self, first: int, batch: list[Instruction]) -> None:
        """Queue a batch; blocks while no credit is left.

        Raises:
            InternalError: an earlier batch broke the worker itself.
        """
        self._check()
        self._items.put((first, batch, None))

    def request(self, first: int, batch: list[Instruction]) -> PendingReply:
        """Queue a batch whose last instruction is answered; blocks while no credit is left.

        Raises:
            InternalError: an earlier batch broke the worker itself; a break in this one is raised by ``result``.
        """
        self._check()
        reply: Future[Reply] = Future()
        reply.set_running_or_notify_cancel()
        self._items.put((first, batch, reply))
        return reply

    def close(self) -> None:
        """Let the queue run out and join the thread; a second call does nothing.

        Raises:
            InternalError: the thread did not end in time.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._items.put(None, timeout=self._close_timeout_s)
        except queue.Full:
            raise InternalError(f"the worker took no batch for {self._close_timeout_s} s") from None
        self._thread.join(self._close_timeout_s)
        if self._thread.is_alive():
            raise InternalError(f"the worker did not end within {self._close_timeout_s} s")

    def _check(self) -> None:
        """Raise what broke the worker, if anything did."""
        if self._broken is not None:
            raise InternalError(f"the worker broke in an earlier batch: {self._broken!r}") from self._broken

    def _work(self) -> None:
        while (item := self._items.get()) is not None:
            self._step(*item)
            # The batch's tensors must not live until the next batch comes.
            del item
        self._runner.close()

    def _step(self, first: int, batch: list[Instruction], reply: Future[Reply] | None) -> None:
        try:
            self._check()
            if reply is None:
                self._runner.submit(first, batch)
                return
            answer = self._runner.run(first, batch)
        except BaseException as error:  # handed to whoever calls next, since nobody waits for this thread
            self._broken = self._broken or error
            if reply is not None:
                reply.set_exception(error)
            return
        reply.set_result(answer)
