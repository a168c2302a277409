"""The controller's process: it knows who is there, lets a client in, and begins and ends its session."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from concurrent.futures import Future
from functools import partial

import msgspec

from ..core.control import (
    ABORT,
    CLOSE,
    END,
    KILL,
    LOST,
    MEET,
    REFUSED,
    START,
    WAITING,
    WELCOME,
    Gone,
    Head,
    Hello,
    Sign,
    Title,
)
from ..core.errors import ProtocolError, four_parts
from ..observability.status import Status
from ..transport.relay import Frames, Relay
from ..transport.wire import body, headed
from .health import HealthServer
from .keys import Keys
from .membership import Change, Left, Lost, Member
from .node import Node, end_with_parent
from .roster import Lease, lease
from .status import member, members, workers

log = logging.getLogger("dtorch.controller")


class HeadTask(msgspec.Struct, frozen=True):
    """What a controller is told that a client starts for itself: a line of JSON on its standard input.

    Attributes:
        answer_fd: where it writes its address and that of the health service.
    """

    workers: int
    answer_fd: int
    keys: dict[str, str]


class Controller(Node):
    """The node above all others.

    Args:
        relay: its sockets.
        keys: of the cluster.
        listen: where the health service does.
        own: how many workers it starts itself, for a client that has started it and ends it; None without such a client.
    """

    title: Title = "controller"

    def __init__(self, relay: Relay, keys: Keys, listen: str, own: int | None = None) -> None:
        self._owned = own is not None
        self._client: str | None = None
        self._pending: Hello | None = None
        self._epoch = 0
        self.health = HealthServer(
            keys, listen, lambda change: relay.call(partial(self.changed, change)), spare=self._spare, status=self._ask
        )
        super().__init__(relay, keys, self.health.address, "local", [{}] * (own or 0), "127.0.0.1")

    def run(self) -> None:
        """Work until told to end."""
        try:
            super().run()
        finally:
            self.health.close()

    def came(self, child: str, hello: Hello) -> None:
        """Someone has come: a client that wants a session, an agent with workers, or a worker."""
        if hello.role == "client":
            if self._client not in (None, child):
                self.relay.to_child(child, headed(Head(REFUSED), _in_use(self._client)))
                return
            self._end_session()
            self._client, self._pending = child, hello
        else:
            log.info("%s %s is there, with workers %s", hello.role, child, ", ".join(w.name for w in hello.workers))
            self.roster.set(child, hello.workers)
        self._try_to_begin()

    def from_child(self, child: str, head: Head, frames: Frames) -> None:
        """See ``Handler``."""
        if head.kind == CLOSE and self._owned:
            self.close()
        elif child != self._client:
            super().from_child(child, head, frames)
        elif head.kind in (CLOSE, END):
            self._free()
        elif self.lease is not None and head.epoch == self.lease.epoch:
            self.pass_down(head, frames)
        else:
            super().from_child(child, head, frames)

    def from_parent(self, head: Head, frames: Frames) -> None:
        """There is nobody above."""

    def changed(self, change: Change) -> None:
        """What the health service has noticed."""
        if not isinstance(change, Lost | Left):
            return
        member = change.member
        if isinstance(change, Lost):
            last = change.last.operator if change.last is not None and change.last.busy_s else ""
            how = f"has been silent for {change.silent_s:.1f} s" + (f", since it began {last}" if last else "")
        else:
            how = "has left"
        if member.role == "client" and member.name == self._client and not self._owned:
            level = logging.WARNING if isinstance(change, Lost) else logging.INFO
            log.log(level, "the client %s %s: its session ends", member.name, how)
            self._free()
        elif member.role == "agent":
            log.warning("the agent %s %s", member.name, how)
            for name in [worker.name for child, worker in self.roster.workers if child == member.name]:
                self.worker_gone(Gone(name, f"is behind an agent that {how}"))
                self.health.say(name, KILL, name)
            self.roster.remove(member.name)
            self._try_to_begin()
        elif member.role == "worker":
            self.worker_gone(Gone(member.name, how))
            # It may be frozen. Whoever started it starts another in its place.
            self.own.kill(member.name)
            for child in self.roster.children:
                self.health.say(child, KILL, member.name)

    def pass_up(self, frames: Frames) -> None:
        """Give the client a message."""
        if self._client is not None:
            self.relay.to_child(self._client, frames)

    def ready(self, lease: Lease, head: Head, frames: Frames) -> None:
        """The session is on when the last worker is ready; then all are told how to find each other."""
        if len(head.workers) != 1 or head.workers[0] not in lease.waited_for:
            raise ProtocolError(f"workers {head.workers} are ready, but {lease.waited_for} are waited for")
        lease.signs[head.workers[0]] = body(frames, Sign)
        lease.waited_for.remove(head.workers[0])
        if not lease.waited_for and self._pending is not None:
            asked, self._pending = self._pending.asked, None
            meet = Head(MEET, lease.epoch)
            self.pass_down(meet, headed(meet, [lease.signs[n] for n in sorted(lease.signs)]))
            self.pass_up(headed(Head(WELCOME, lease.epoch, count=asked), lease.start))

    def worker_gone(self, gone: Gone) -> None:
        """The client is told, or the session begins anew without the worker where it had not begun."""
        self.roster.remove(gone.worker)
        if not self._owned:
            log.warning("worker %s %s", gone.worker, gone.how)
        number = self.lease.number(gone.worker) if self.lease is not None else None
        if self.lease is None or number is None:
            return
        self._abort(gone.worker)
        if self._pending is None:
            self.pass_up(headed(Head(LOST, self.lease.epoch, [number]), gone.how))
        else:
            self._end_session()
            self._try_to_begin()

    def status(self) -> Status:
        """See ``Node``."""
        standings = {s.member.name: s for s in self.health.standings()}
        client = standings.get(self._client or "")
        return Status(
            role="controller",
            name=self.relay.address,
            host=socket.gethostname(),
            pid=os.getpid(),
            epoch=self._epoch,
            running=self.lease is not None,
            client=None if client is None else member(client),
            agents=members(standings, "agent"),
            workers=workers(self.roster, self.lease, self.own.running, socket.gethostname(), standings),
            counters=self._counters(**{f"{reason} (health)": n for reason, n in list(self.health.dropped.items())}),
        )

    def _abort(self, gone: str = "") -> None:
        """Let no worker wait for another any more."""
        if self.lease is not None:
            for worker in self.lease.start.workers:
                if worker.name != gone:
                    self.health.say(worker.name, ABORT, str(self.lease.epoch))

    def _try_to_begin(self) -> None:
        hello, there = self._pending, self.roster.workers
        if hello is None or self.lease is not None:
            return
        # Who wants all that are there wants those too that are being started anew.
        if len(there) < (hello.wanted or 1) or (self.roster.missing and not hello.wanted):
            self.pass_up(headed(Head(WAITING, count=len(there))))
            return
        self._epoch += 1
        begun = lease(self._epoch, there[: hello.wanted or None], hello.counts, hello.threads, hello.log_level)
        self.begin(begun, headed(Head(START, self._epoch), begun.start))

    def _free(self) -> None:
        """The client is gone."""
        self._abort()
        self._end_session()
        self._client = self._pending = None

    def _end_session(self) -> None:
        if self.lease is not None:
            head = Head(END, self.lease.epoch)
            self.pass_down(head, headed(head))
            self.lease = None

    def _ask(self) -> Future[bytes]:
        return self.relay.ask(lambda: msgspec.msgpack.encode(self.status()))

    def _spare(self, member: Member) -> bool:
        # The client that has started this process need not speak, and may be stopped: its end is seen.
        return self._owned and member.role == "client"


def main() -> None:
    """Be the controller of a client on this machine, with workers of one's own."""
    # Ctrl-C at a terminal goes to all processes there. It is the client's to act on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=HeadTask)
    keys = Keys(**task.keys)  # type: ignore[arg-type]
    relay = Relay(keys.lock, "tcp://127.0.0.1:*")
    controller = Controller(relay, keys, "127.0.0.1:0", task.workers)
    end_with_parent(lambda: relay.call(relay.stop))
    with os.fdopen(task.answer_fd, "w") as answer:
        answer.write(f"{relay.address} {controller.health.address}\n")
    controller.run()


def _in_use(client: str | None) -> str:
    remedy = "wait until it has ended, or use another cluster"
    return four_parts(f"a second client beside {client}", "a cluster serves one program at a time", "dtorch.init", remedy)
