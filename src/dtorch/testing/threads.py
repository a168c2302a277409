"""Several workers in threads of this process, whose peers meet in memory: a session of many workers without a process.

The process has one random generator, so random numbers are not to be drawn there.
"""

from __future__ import annotations

import queue
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..communication.peers import Message
from ..controller.service import Service
from ..core.grid import Here
from ..core.hosting import Hosting
from ..tensor.client import Client
from ..transport.base import Each
from ..transport.messages import EncodedTransport
from ..worker.executor import Executor
from .sessions import in_place
from .thread import ThreadTransport

PATIENCE_S = 60.0
"""How long a worker waits for another before it is taken to be lost."""


class Lanes:
    """A queue from each worker to each other."""

    def __init__(self, workers: int) -> None:
        # All at once, for two threads that each make what is missing may make it twice.
        self._lanes: dict[tuple[int, int], queue.Queue[Any]] = {
            (a, b): queue.Queue() for a in range(workers) for b in range(workers)
        }

    def peers(self, me: int) -> MemoryPeers:
        """A worker's end."""
        return MemoryPeers(me, self._lanes)


class MemoryPeers:
    """Peers whose bytes go through queues."""

    def __init__(self, me: int, lanes: Any) -> None:
        self._me, self._lanes = me, lanes

    def exchange(self, peers: Collection[int], sends: Sequence[Message], receives: Sequence[Message]) -> set[int]:
        """See ``Peers``."""
        for peer in peers:
            self._lanes[self._me, peer].put([t.clone() for to, t in sends if to == peer])
        given = {peer: self._lanes[peer, self._me].get(timeout=PATIENCE_S) for peer in peers}
        for peer, tensors in given.items():
            rooms = [room for sender, room in receives if sender == peer]
            if tensors is None:
                continue
            for tensor, room in zip(tensors, rooms, strict=True):
                room.copy_(tensor)
        return {peer for peer, tensors in given.items() if tensors is None}

    def refuse(self, peers: Collection[int]) -> None:
        """See ``Peers``."""
        for peer in peers:
            self._lanes[self._me, peer].put(None)
        for peer in peers:
            self._lanes[peer, self._me].get(timeout=PATIENCE_S)

    def abort(self) -> None:
        """Nothing: threads do not die."""

    def close(self) -> None:
        """Nothing."""


@contextmanager
def threaded_session(workers: int, counts: dict[str, list[int]] | None = None) -> Iterator[Client]:
    """A session of several workers in place of the running one, which comes back afterwards."""
    hosting, lanes = Hosting(workers, counts or {}), Lanes(workers)
    # Encoded, for otherwise workers would share the memory of what is put.
    ends = [EncodedTransport(ThreadTransport(Executor(here=Here(hosting, n), others=lanes.peers(n)))) for n in range(workers)]
    with in_place(Client(Service(Each(*ends), hosting=hosting, travels=True), lambda mesh: None)) as client:
        yield client
