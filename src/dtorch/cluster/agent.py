"""The agent of a host: it starts and watches the host's workers, and passes on what is for them and from them."""

from __future__ import annotations

import logging

from ..core.control import CLOSE, GONE, HELLO, REFUSED, START, Gone, Head, Hello, Start
from ..core.errors import ProtocolError
from ..transport.relay import Frames
from ..transport.wire import body, headed
from .node import VERSIONS, Node
from .roster import Lease

log = logging.getLogger("dtorch.agent")


class Agent(Node):
    """The node between the controller and the workers of a host."""

    refused: str | None = None

    def came(self, child: str, hello: Hello) -> None:
        """A worker has come. Once all are there the controller is told, and at each that comes later."""
        self.roster.set(child, hello.workers)
        workers = [worker for _, worker in self.roster.workers]
        if len(workers) == self.own.count:
            self.relay.to_parent(headed(Head(HELLO), Hello("agent", self.name, VERSIONS, workers)))

    def from_parent(self, head: Head, frames: Frames) -> None:
        """See ``Handler``."""
        if head.kind == START:
            start, here = body(frames, Start), dict((w.name, child) for child, w in self.roster.workers)
            routes = {n: here[worker.name] for n, worker in enumerate(start.workers) if worker.name in here}
            if not routes:
                raise ProtocolError("a session without a worker of this host")
            self.begin(Lease(head.epoch, start, routes), frames)
        elif head.kind == CLOSE:
            self.close()
        elif head.kind == REFUSED:
            self.refused = body(frames, str)
            self.close()
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
