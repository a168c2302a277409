"""Who is there, who takes part in the session, and how far they are: state without I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..core.control import Head, Sign, Start, WorkerInfo
from ..core.errors import ProtocolError
from ..core.hosting import Hosting


class Roster:
    """The workers that have come, by the child through which each is reached: itself, or the agent of its host."""

    def __init__(self) -> None:
        self._by_child: dict[str, list[WorkerInfo]] = {}
        self._hosts: dict[str, int] = {}
        self._whole: dict[str, int] = {}

    def set(self, child: str, workers: Sequence[WorkerInfo]) -> None:
        """These are the workers behind a child now."""
        self._by_child[child] = list(workers)
        self._whole[child] = len(self._by_child[child])
        for worker in workers:
            self._hosts.setdefault(_host(worker), len(self._hosts))

    def remove(self, name: str) -> None:
        """A child, or one worker, is gone."""
        self._by_child.pop(name, None)
        for workers in self._by_child.values():
            workers[:] = [w for w in workers if w.name != name]

    @property
    def workers(self) -> list[tuple[str, WorkerInfo]]:
        """Child and worker: hosts in the order in which they came, workers of a host in that of their places."""
        there = [(child, worker) for child, workers in self._by_child.items() for worker in workers]
        return sorted(there, key=lambda each: (self._hosts[_host(each[1])], int(each[1].name.split(".")[-2])))

    @property
    def missing(self) -> int:
        """How many workers have ended whose host is there and starts others in their place."""
        return sum(self._whole[child] - len(workers) for child, workers in self._by_child.items())

    @property
    def children(self) -> list[str]:
        """All children."""
        return list(self._by_child)


@dataclass
class Lease:
    """The workers of one session, and how far they are.

    Attributes:
        start: what all are told.
        routes: the child behind which each worker is, by number.
        waited_for: numbers of those that are not ready yet.
        signs: how those that are are found.
    """

    epoch: int
    start: Start
    routes: dict[int, str]
    waited_for: set[int] = field(init=False)
    signs: dict[int, Sign] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.waited_for = set(self.routes)
        self.children = list(dict.fromkeys(self.routes.values()))
        self._done = dict.fromkeys(self.children, 0)
        self._told = 0
        self._sent_to_all, self._sent_to = 0, dict.fromkeys(self.routes, 0)

    def number(self, name: str) -> int | None:
        """Number of a worker; None for one that takes no part."""
        return next((n for n, worker in enumerate(self.start.workers) if worker.name == name), None)

    def targets(self, head: Head) -> list[str]:
        """The children to which a message goes on.

        Raises:
            ProtocolError: it is for a worker that there is not.
        """
        if not head.workers:
            return self.children
        if not all(0 <= n < len(self.start.workers) for n in head.workers):
            raise ProtocolError(f"a message for workers {head.workers} of {len(self.start.workers)}")
        return list(dict.fromkeys(self.routes[n] for n in head.workers if n in self.routes))

    def sent(self, head: Head) -> None:
        """A batch has gone on."""
        if not head.workers:
            self._sent_to_all += 1
        for number in head.workers:
            if number in self._sent_to:
                self._sent_to[number] += 1

    def queue(self, number: int) -> tuple[int, int]:
        """How many batches have gone on to a worker, and how many of these are not known to be done."""
        if number not in self.routes:
            return 0, 0
        sent = self._sent_to_all + self._sent_to[number]
        return sent, sent - self._done[self.routes[number]]

    def progressed(self, child: str, count: int) -> int | None:
        """How many batches all have run, where that is news."""
        if child in self._done:
            self._done[child] = max(count, self._done[child])
        least = min(self._done.values())
        if least == self._told:
            return None
        self._told = least
        return least


def _host(worker: WorkerInfo) -> str:
    return worker.name.rsplit(".", 2)[0]


def lease(
    epoch: int,
    there: Sequence[tuple[str, WorkerInfo]],
    counts: dict[str, list[int]],
    threads: int,
    log_level: int | None = None,
) -> Lease:
    """A session of these workers, each given with its child."""
    workers = [worker for _, worker in there]
    kinds = dict.fromkeys(kind for worker in workers for kind in worker.devices)
    counts = counts or {kind: [worker.devices.get(kind, 0) for worker in workers] for kind in kinds}
    start = Start(workers, Hosting(len(workers), counts), threads, log_level)
    return Lease(epoch, start, dict(enumerate(child for child, _ in there)))
