"""``Service``: takes the client's instructions, sends them on to the workers, and makes one reply of theirs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..core.errors import SessionClosedError, four_parts
from ..core.hosting import ALONE, Hosting
from ..core.program import Instruction, PendingReply, Reply
from ..transport.base import Network
from .blame import Blame
from .state import BatchArrived, ControllerState, merged

CheckMesh = Callable[[str, Sequence[int]], None]


class Service:
    """A ``Sink`` over workers.

    Args:
        network: the way to the workers; closed with the service.
        check_mesh: raises MeshError for devices that the workers' machines do not have.
        hosting: which worker hosts which device.
        travels: whether instructions leave the process.
    """

    def __init__(
        self,
        network: Network,
        check_mesh: CheckMesh | None = None,
        hosting: Hosting = ALONE,
        travels: bool = False,
    ) -> None:
        self.state = ControllerState(hosting)
        self.travels = travels
        self._network = network
        self._check_mesh = check_mesh
        self._closed = False
        self._blame = Blame()

    def check_mesh(self, device_type: str, ids: Sequence[int]) -> None:
        """Check that logical devices exist, before anything is placed on them.

        Raises:
            MeshError: they do not.
            SessionClosedError: after ``close``.
        """
        self._check_open()
        if self._check_mesh is not None:
            self._check_mesh(device_type, ids)

    def submit(self, first: int, batch: list[Instruction]) -> None:
        """Send a batch; its effects need not be visible yet.

        Raises:
            SessionClosedError: after ``close``.
        """
        self._check_open()
        self._network.submit(first, self.state.handle(BatchArrived(first, batch)))

    def request(self, first: int, batch: list[Instruction]) -> PendingReply:
        """Send a batch and answer its last instruction, once every worker has.

        Raises:
            SessionClosedError: after ``close``.
        """
        self._check_open()
        replies = self._network.request(first, self.state.handle(BatchArrived(first, batch)))
        return replies[0] if len(replies) == 1 else Replies(replies, self._blame)

    def close(self) -> None:
        """End the workers and release everything; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._network.close()

    def _check_open(self) -> None:
        if self._closed:
            given = "an operation on a session that was shut down"
            rule = "tensors live as long as their session"
            remedy = "make new tensors: the next use starts a new session"
            raise SessionClosedError(four_parts(given, rule, "after dtorch.shutdown()", remedy))


class Replies:
    """The replies of several workers as one."""

    def __init__(self, replies: Sequence[PendingReply], blame: Blame) -> None:
        self._replies, self._blame = replies, blame

    def done(self) -> bool:
        """Whether all are there."""
        return all(reply.done() for reply in self._replies)

    def result(self, timeout: float | None = None) -> Reply:
        """All of them as one. For what failed for want of what another worker failed to give, that is told."""
        deadline = None if timeout is None else time.monotonic() + timeout
        replies = [r.result(None if deadline is None else max(0.0, deadline - time.monotonic())) for r in self._replies]
        for worker, reply in enumerate(replies):
            self._blame.hear(worker, reply)
        failures = sorted((f for reply in replies for f in reply.failures), key=lambda f: f.sequence)
        causes = [f for f in failures if not f.caused]
        if failures:
            return Reply(None, causes or [self._blame.first(failures[0])])
        return Reply(merged([reply.result for reply in replies]))

    def add_done_callback(self, fn: Any) -> None:
        """Call ``fn(self)`` once all are there."""
        left, lock = [len(self._replies)], threading.Lock()

        def one(_: Any) -> None:
            with lock:
                left[0] -= 1
                last = left[0] == 0
            if last:
                fn(self)

        for reply in self._replies:
            reply.add_done_callback(one)
