"""Short messages from worker to worker, for those that have yet to find a way to each other."""

from __future__ import annotations

from typing import Any

import zmq

from .wire import Gate, Lock, connect

MOST_NBYTES = 64 << 10
"""No message is longer."""


class Post:
    """A worker's letter box, and its letters to others. One thread uses it.

    Args:
        me: number of the worker.
        address: of its host.
        lock: of the cluster's key.

    Attributes:
        address: of its letter box.
    """

    def __init__(self, me: int, address: str, lock: Lock) -> None:
        self._me, self._key = me, lock.key
        self._context = zmq.Context()
        self._gate = Gate(self._context, lock)
        self._box = self._gate.listen(f"tcp://{address}:*", MOST_NBYTES)
        self.address = self._box.getsockopt_string(zmq.LAST_ENDPOINT)
        self._addresses: list[str] = []
        self._ways: dict[int, zmq.Socket] = {}
        self._come: dict[tuple[int, str], bytes] = {}

    def introduce(self, addresses: list[str]) -> None:
        """The letter boxes of all workers, by number."""
        self._addresses = addresses

    def send(self, peer: int, subject: str, data: bytes) -> None:
        """Send a worker something about a subject."""
        if peer not in self._ways:
            self._ways[peer] = connect(self._context, self._addresses[peer], str(self._me), self._key)
        self._ways[peer].send_multipart([subject.encode(), data])

    def receive(self, peer: int, subject: str) -> bytes | None:
        """What a worker has sent about a subject, once; None while it has not come."""
        while self._box.poll(0):
            self._keep(*self._box.recv_multipart())
        return self._come.pop((peer, subject), None)

    def close(self) -> None:
        """Close the letter box."""
        self._gate.close()
        self._context.destroy(0)

    def _keep(self, sender: bytes, *parts: Any) -> None:
        # What is of no worker, or not of two parts, is nothing that a worker sends.
        if len(parts) == 2 and sender.isdigit() and int(sender) < len(self._addresses):
            self._come[int(sender), parts[0].decode(errors="replace")] = parts[1]
