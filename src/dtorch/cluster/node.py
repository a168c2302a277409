"""What the head of a cluster and the agent of a host have in common: children, workers of their own, and what passes through."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from ..core import control, program
from ..core.control import (
    CLOSE,
    DONE,
    END,
    GONE,
    HELLO,
    LOG,
    MEET,
    READY,
    REFUSED,
    REPLY,
    REQUEST,
    SUBMIT,
    Gone,
    Head,
    Hello,
    Origin,
    Record,
    Task,
    Title,
    check_versions,
)
from ..core.errors import ProtocolError
from ..observability.logs import Outlet
from ..observability.status import Counters, Status
from ..transport.relay import Frames, Relay
from ..transport.wire import body, headed
from .keys import Keys
from .local import LocalWorkers
from .roster import Lease, Roster

VERSIONS = [control.VERSION, program.VERSION]


class Node(ABC):
    """A process between the client and workers.

    Args:
        relay: its sockets.
        keys: of the cluster.
        health: address of the health service.
        name: its own among the others.
        devices: for each worker that it is to start, how many devices of each type it hosts.
        address: that others reach this host by.

    Attributes:
        title: what it is, for people.
    """

    title: Title

    def __init__(self, relay: Relay, keys: Keys, health: str, name: str, devices: Sequence[dict[str, int]], address: str) -> None:
        self.relay, self.name, self.batches = relay, name, 0
        self.roster = Roster()
        self._outlet: Outlet | None = None
        self.lease: Lease | None = None
        parent = relay.address.replace("0.0.0.0", "127.0.0.1")
        given = msgspec.structs.asdict(keys)
        tasks = [Task(parent, "", socket.gethostname(), address, each, health, given) for each in devices]
        self.own = LocalWorkers(tasks, name, self.worker_ended)

    def run(self) -> None:
        """Work until told to end."""
        # A signal wakes the loop, which then looks what has ended.
        signal.set_wakeup_fd(self.relay.wake_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self.relay.call(self.close))
        self.own.start()
        try:
            self.relay.run(self, self.own.reap)
        finally:
            signal.set_wakeup_fd(-1)
            self._log_no_more()
            self.own.end()
            self.relay.close()

    def close(self) -> None:
        """End everything below, and then this."""
        for child in self.roster.children:
            self.relay.to_child(child, headed(Head(CLOSE)))
        self.own.end(told=[worker.name for _, worker in self.roster.workers])
        self.relay.stop()

    def from_child(self, child: str, head: Head, frames: Frames) -> None:
        """See ``Handler``."""
        if head.kind == HELLO:
            hello = self._greeted(child, frames)
            self.own.came(child)
            self.came(child, hello)
        elif head.kind == GONE:
            self.worker_gone(body(frames, Gone))
        elif self.lease is not None and head.epoch == self.lease.epoch:
            self._of_the_session(self.lease, child, head, frames)

    @abstractmethod
    def from_parent(self, head: Head, frames: Frames) -> None:
        """See ``Handler``."""

    def _greeted(self, child: str, frames: Frames) -> Hello:
        try:
            hello: Hello = body(frames, Hello)
            check_versions(f"{hello.role} {hello.name}", hello.versions, VERSIONS)
        except ProtocolError as error:
            self.relay.to_child(child, headed(Head(REFUSED), str(error)))
            raise
        return hello

    def pass_down(self, head: Head, frames: Frames) -> None:
        """Give a message of the session to those it is for."""
        if self.lease is None or head.epoch != self.lease.epoch or head.kind not in (MEET, SUBMIT, REQUEST, END):
            return
        for child in self.lease.targets(head):
            self.relay.to_child(child, frames)
        if head.kind in (SUBMIT, REQUEST):
            self.batches += 1
            self.lease.sent(head)
        elif head.kind == END:
            self._log_no_more()

    def begin(self, lease: Lease, frames: Frames) -> None:
        """Start a session."""
        self.lease = lease
        self._log_no_more()
        if lease.start.log_level is not None:
            origin = Origin(title=self.title, name=self.name, host=socket.gethostname(), pid=os.getpid())
            self._outlet = Outlet(origin, lease.start.log_level, partial(self._log, lease.epoch))
        for child in lease.children:
            self.relay.to_child(child, frames)

    @abstractmethod
    def came(self, child: str, hello: Hello) -> None:
        """Someone has come."""

    @abstractmethod
    def pass_up(self, frames: Frames) -> None:
        """Give a message of the session to whoever is above."""

    @abstractmethod
    def ready(self, lease: Lease, head: Head, frames: Frames) -> None:
        """Workers are ready for the session."""

    @abstractmethod
    def worker_gone(self, gone: Gone) -> None:
        """A worker has ended."""

    def worker_ended(self, name: str, how: str) -> None:
        """A worker of this host has ended."""
        self.roster.remove(name)
        self.worker_gone(Gone(name, how))

    def _of_the_session(self, lease: Lease, child: str, head: Head, frames: Frames) -> None:
        if head.kind == READY:
            self.ready(lease, head, frames)
            return
        if head.kind in (REPLY, LOG):
            self.pass_up(frames)
        if head.kind in (DONE, REPLY) and (head.kind == DONE or self.is_worker(child)):
            least = lease.progressed(child, head.count)
            if least is not None:
                self.pass_up(headed(Head(DONE, lease.epoch, [], least)))

    @abstractmethod
    def status(self) -> Status:
        """How things are, as far as this process knows; called by the loop."""

    def _log(self, epoch: int, record: Record) -> bool:
        self.relay.call(partial(self.pass_up, headed(Head(LOG, epoch), record)))
        return True

    def _log_no_more(self) -> None:
        if self._outlet is not None:
            self._outlet.close()
            self._outlet = None

    def _counters(self, **dropped: int) -> Counters:
        messages, nbytes = self.relay.passed
        dropped = {"messages": self.relay.dropped, **dropped}
        return Counters(messages=messages, nbytes=nbytes, batches=self.batches, dropped=dropped)

    def is_worker(self, child: str) -> bool:
        """Whether a child is a worker itself."""
        return any(child == worker.name for _, worker in self.roster.workers)


def end_with_parent(then: Any) -> None:
    """Call ``then`` from a thread when the standard input ends, for then whoever started this process is gone."""

    def wait() -> None:
        # Below Python's buffer, which could not be closed while a thread reads.
        while os.read(sys.stdin.fileno(), 1024):
            pass
        then()

    threading.Thread(target=wait, name="dtorch-parent", daemon=True).start()
