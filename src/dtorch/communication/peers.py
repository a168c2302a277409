"""The seam between a worker's steps and the other workers: bytes to and from peers, and refusals."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from torch import Tensor

Message = tuple[int, Tensor]
"""A peer's number, and the bytes (a contiguous tensor of dtype uint8) to send to it, or to fill with what it sends."""


class PeerLost(Exception):
    """Another worker is gone, or says nothing for too long; or this one was told to wait for nobody any more."""

    def __init__(self, peer: int) -> None:
        super().__init__(f"worker {peer} cannot be reached any more")
        self.peer = peer


class Peers(Protocol):
    """The other workers of a session. All of them come to the same exchanges in the same order."""

    def exchange(self, peers: Collection[int], sends: Sequence[Message], receives: Sequence[Message]) -> set[int]:
        """Send and receive; for two workers what one sends is what the other receives, in order.

        Args:
            peers: those that take part. Each learns whether this worker goes on, and the other way round.

        Returns:
            The peers that refused: nothing went to them, and nothing came from them.

        Raises:
            PeerLost: a peer is gone.
        """

    def refuse(self, peers: Collection[int]) -> None:
        """Take part in an exchange without going on: this worker has nothing to give."""

    def abort(self) -> None:
        """End every wait for a peer with ``PeerLost``, from any thread; nothing but ``close`` works afterwards."""

    def close(self) -> None:
        """Let go of all connections."""


class Post(Protocol):
    """Short messages to and from other workers, by which they agree on a way to each other."""

    def send(self, peer: int, subject: str, data: bytes) -> None:
        """Send a worker something about a subject."""

    def receive(self, peer: int, subject: str) -> bytes | None:
        """What a worker has sent about a subject, once; None while it has not come."""

    def close(self) -> None:
        """Take no more."""


class NoPeers:
    """For a worker that is alone."""

    def exchange(self, peers: Collection[int], sends: Sequence[Message], receives: Sequence[Message]) -> set[int]:
        """Nothing, for there is nobody."""
        assert not peers
        return set()

    def refuse(self, peers: Collection[int]) -> None:
        """Nothing, for there is nobody."""
        assert not peers

    def abort(self) -> None:
        """Nothing, for there is nobody."""

    def close(self) -> None:
        """Nothing."""


NO_PEERS = NoPeers()
