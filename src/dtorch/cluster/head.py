"""The controller's process: it knows who is there, lets a client in, and begins and ends its session."""

from __future__ import annotations

import os
import signal
import sys

import msgspec

from ..core.control import CLOSE, END, LOST, REFUSED, START, WELCOME, Gone, Head, Hello
from ..core.errors import four_parts
from ..transport.relay import Frames, Relay
from ..transport.wire import Key, Lock, headed
from .node import Node, end_with_parent
from .roster import Lease, lease


class HeadTask(msgspec.Struct, frozen=True):
    """What a controller is told that a client starts for itself: a line of JSON on its standard input.

    Attributes:
        answer_fd: where it writes its address.
    """

    workers: int
    answer_fd: int
    hub_public: str
    hub_secret: str
    member_public: str
    member_secret: str


class Controller(Node):
    """The node above all others. ``owned``: a client has started it, and ends it."""

    owned = False
    _client: str | None = None
    _pending: Hello | None = None
    _epoch = 0

    def came(self, child: str, hello: Hello) -> None:
        """Someone has come: a client that wants a session, an agent with workers, or a worker."""
        if hello.role == "client":
            if self._client not in (None, child):
                self.relay.to_child(child, headed(Head(REFUSED), _in_use(self._client)))
                return
            self._end_session()
            self._client, self._pending = child, hello
        else:
            self.roster.set(child, hello.workers)
        self._try_to_begin()

    def from_child(self, child: str, head: Head, frames: Frames) -> None:
        """See ``Handler``."""
        if child != self._client:
            super().from_child(child, head, frames)
        elif head.kind == CLOSE and self.owned:
            self.close()
        elif head.kind in (CLOSE, END):
            self._end_session()
            self._client = self._pending = None
        elif self.lease is not None and head.epoch == self.lease.epoch:
            self.pass_down(head, frames)
        else:
            super().from_child(child, head, frames)

    def pass_up(self, frames: Frames) -> None:
        """Give the client a message."""
        if self._client is not None:
            self.relay.to_child(self._client, frames)

    def ready(self, lease: Lease, head: Head, frames: Frames) -> None:
        """The session is on when the last worker is ready."""
        lease.waited_for.difference_update(head.workers)
        if not lease.waited_for and self._pending is not None:
            self._pending = None
            self.pass_up(headed(Head(WELCOME, lease.epoch), lease.start))

    def worker_gone(self, gone: Gone) -> None:
        """The client is told, or the session begins anew without the worker where it had not begun."""
        self.roster.remove(gone.worker)
        number = self.lease.number(gone.worker) if self.lease is not None else None
        if self.lease is None or number is None:
            return
        if self._pending is None:
            self.pass_up(headed(Head(LOST, self.lease.epoch, [number]), gone.how))
        else:
            self._end_session()
            self._try_to_begin()

    def _try_to_begin(self) -> None:
        hello, there = self._pending, self.roster.workers
        if hello is None or self.lease is not None or not there or len(there) < hello.wanted:
            return
        self._epoch += 1
        begun = lease(self._epoch, there[: hello.wanted or None], hello.counts, hello.threads)
        self.begin(begun, headed(Head(START, self._epoch), begun.start))

    def _end_session(self) -> None:
        if self.lease is not None:
            head = Head(END, self.lease.epoch)
            self.pass_down(head, headed(head))
            self.lease = None


def main() -> None:
    """Be the controller of a client on this machine, with workers of one's own."""
    # Ctrl-C at a terminal goes to all processes there. It is the client's to act on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=HeadTask)
    key = Key(task.hub_public.encode(), task.member_public.encode(), task.member_secret.encode())
    relay = Relay(Lock(key, task.hub_secret.encode()), "tcp://127.0.0.1:*")
    controller = Controller(relay, key, "local", [{}] * task.workers, "127.0.0.1")
    controller.owned = True
    end_with_parent(lambda: relay.call(relay.stop))
    os.write(task.answer_fd, relay.address.encode() + b"\n")
    os.close(task.answer_fd)
    controller.run()


def _in_use(client: str | None) -> str:
    remedy = "wait until it has ended, or use another cluster"
    return four_parts(f"a second client beside {client}", "a cluster serves one program at a time", "dtorch.init", remedy)
