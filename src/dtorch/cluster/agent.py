"""The agent of a host: it starts and watches the host's workers, and passes on what is for them and from them."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Sequence
from functools import partial

from ..core.control import CLOSE, GONE, HELLO, KILL, REFUSED, START, Gone, Head, Hello, Start, Title
from ..core.errors import ProtocolError
from ..observability.status import Status
from ..transport.relay import Frames, Relay
from ..transport.wire import body, headed
from .beating import HealthMember
from .keys import Keys
from .membership import Member
from .node import VERSIONS, Node
from .pulse import REFUSED as NO_MEMBER
from .pulse import Word
from .roster import Lease
from .status import workers

log = logging.getLogger("dtorch.agent")

JOIN_S = 60.0
"""How long a controller may take to be there: it is often started together with its agents."""


class Agent(Node):
    """The node between the controller and the workers of a host.

    Attributes:
        joined: the controller has answered.
        failed: it ended because of the controller, which let it not in or has fallen silent.
    """

    title: Title = "agent"
    joined = failed = False

    def __init__(self, relay: Relay, keys: Keys, health: str, name: str, devices: Sequence[dict[str, int]], address: str) -> None:
        super().__init__(relay, keys, health, name, devices, address)
        self._health = health
        who = Member(name=name, role="agent", incarnation=time.time_ns(), host=socket.gethostname(), pid=os.getpid())
        self._member = HealthMember(keys, health, who, on_word=self._told, on_silence=self._silent, first_s=JOIN_S)

    def run(self) -> None:
        """Work until told to end."""
        try:
            self.joined = self._member.await_answer(JOIN_S)
            if self.joined:
                log.info("the controller at %s answers; %d workers are started", self._health, self.own.count)
                super().run()
                log.info("this host's part is over")
            else:
                log.error("no answer from the controller's health service at %s within %.0f s", self._health, JOIN_S)
                self.failed = True
                self.relay.close()
        finally:
            self._member.close()

    def came(self, child: str, hello: Hello) -> None:
        """A worker has come. Once all are there the controller is told, and at each that comes later."""
        self.roster.set(child, hello.workers)
        self._introduce()

    def _introduce(self) -> None:
        workers = [worker for _, worker in self.roster.workers]
        if len(workers) == self.own.count:
            log.info("all %d workers are there", len(workers))
            self.relay.to_parent(headed(Head(HELLO), Hello("agent", self.name, VERSIONS, workers)))

    def from_parent(self, head: Head, frames: Frames) -> None:
        """See ``Handler``."""
        if head.kind == START:
            start, here = body(frames, Start), {w.name: child for child, w in self.roster.workers}
            routes = {n: here[worker.name] for n, worker in enumerate(start.workers) if worker.name in here}
            if not routes:
                raise ProtocolError("a session without a worker of this host")
            self.begin(Lease(head.epoch, start, routes), frames)
        elif head.kind == CLOSE:
            self.close()
        elif head.kind == REFUSED:
            self._give_up(body(frames, str))
        else:
            self.pass_down(head, frames)

    def pass_up(self, frames: Frames) -> None:
        """Give the controller a message."""
        self.relay.to_parent(frames)

    def ready(self, lease: Lease, head: Head, frames: Frames) -> None:
        """The controller counts who is ready."""
        self.pass_up(frames)

    def worker_gone(self, gone: Gone) -> None:
        """The controller is told."""
        log.warning("worker %s %s", gone.worker, gone.how)
        self.pass_up(headed(Head(GONE), gone))
        if self.own.count:
            self._introduce()
        else:
            self._give_up("no worker can be started on this host; what they print says why")

    def status(self) -> Status:
        """See ``Node``. The beats of the workers go to the controller, so it knows more."""
        epoch = self.lease.epoch if self.lease is not None else 0
        return Status(
            role="agent",
            name=self.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            epoch=epoch,
            running=epoch > 0,
            workers=workers(self.roster, self.lease, self.own.running, socket.gethostname(), {}),
            counters=self._counters(),
        )

    def _told(self, word: Word) -> None:
        if word.text == KILL:
            self.relay.call(partial(self.own.kill, word.detail))
        elif word.text == NO_MEMBER:
            self.relay.call(partial(self._give_up, f"the controller has given this host up: {word.detail}"))

    def _silent(self, silent_s: float) -> None:
        self.relay.call(partial(self._give_up, f"the controller has been silent for {silent_s:.1f} s"))

    def _give_up(self, why: str) -> None:
        log.error("%s", why)
        self.failed = True
        # Workers may wait for others that nothing will come from, and would not hear.
        self.own.end()
        self.relay.stop()
