"""Workers in processes of their own: bytes go through process groups of PyTorch, one for each pair of workers that meet."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .peers import Message

GO, REFUSE = 1, 0

BLOCK_NBYTES = 4 << 10
"""What goes along with the word that opens an exchange. Its size is fixed, for who refuses does not know what was to come."""


class ProcessPeers:
    """Peers over pairwise process groups, made when two workers first meet.

    A block goes each way before anything else counts. It begins with a word; little data follows in it, more by itself. A
    pair of which one refuses is left as it is, with what is under way on it, and the next meeting makes a new one.

    Args:
        me: number of this worker.
        workers: how many there are.
        place: a file through which they find each other.
        timeout_s: how long a peer may keep this worker waiting.
    """

    def __init__(self, me: int, workers: int, place: str, timeout_s: float) -> None:
        self._me, self._timeout = me, timedelta(seconds=timeout_s)
        self._store = dist.FileStore(place, workers)
        self._pairs: dict[int, _Pair] = {}
        self._made: dict[int, int] = {}

    def exchange(self, peers: Collection[int], sends: Sequence[Message], receives: Sequence[Message]) -> set[int]:
        """See ``Peers``."""
        talks = [
            _Talk(peer, self._pair(peer), [t for w, t in sends if w == peer], [t for w, t in receives if w == peer])
            for peer in sorted(peers)
        ]
        refused = {talk.peer for talk in talks if talk.opened(self._timeout) == REFUSE}
        for talk in talks:
            if talk.peer in refused:
                self._leave(talk.peer)
            else:
                talk.finish(self._timeout)
        return refused

    def refuse(self, peers: Collection[int]) -> None:
        """See ``Peers``."""
        talks = [_Talk(peer, self._pair(peer), [], [], REFUSE) for peer in sorted(peers)]
        for talk in talks:
            talk.opened(self._timeout)
            self._leave(talk.peer)

    def close(self) -> None:
        """Let go of all connections."""
        for peer in list(self._pairs):
            self._leave(peer)

    def _pair(self, peer: int) -> _Pair:
        if peer not in self._pairs:
            number = self._made[peer] = self._made.get(peer, 0) + 1
            first, second = sorted((self._me, peer))
            store = dist.PrefixStore(f"{first}-{second}-{number}", self._store)
            self._pairs[peer] = _Pair(store, int(self._me > peer), self._timeout)
        return self._pairs[peer]

    def _leave(self, peer: int) -> None:
        self._pairs.pop(peer).group.abort()


class _Pair:
    """The connection of two workers. Messages each way are numbered, which tells them apart."""

    def __init__(self, store: dist.Store, rank: int, timeout: timedelta) -> None:
        self.group: Any = dist.ProcessGroupGloo(store, rank, 2, timeout)
        self.other = 1 - rank
        self.sent = self.received = 0

    def send(self, tensor: Tensor) -> Any:
        """Send bytes; they must stay as they are until the work is done."""
        self.sent += 1
        return self.group.send([tensor], self.other, self.sent)

    def receive(self, tensor: Tensor) -> Any:
        """Fill a tensor with what comes."""
        self.received += 1
        return self.group.recv([tensor], self.other, self.received)


class _Talk:
    """One exchange of a pair, under way."""

    def __init__(self, peer: int, pair: _Pair, sends: list[Tensor], rooms: list[Tensor], word: int = GO) -> None:
        self.peer = peer
        self._said, self._heard = (torch.empty(1 + BLOCK_NBYTES, dtype=torch.uint8) for _ in range(2))
        self._said[0] = word
        # Both sides know how much goes each way, and so whether it is in the block.
        self._inside = rooms if sum(map(len, rooms)) <= BLOCK_NBYTES else []
        if sends and sum(map(len, sends)) <= BLOCK_NBYTES:
            together = torch.cat(sends)
            self._said[1 : 1 + len(together)] = together
            sends = []
        self._opening = [pair.send(self._said), pair.receive(self._heard)]
        # Held until they are done.
        self._tensors = sends
        self._rest = [*map(pair.send, sends), *map(pair.receive, () if self._inside else rooms)]

    def opened(self, timeout: timedelta) -> int:
        """What the other said; waits for it."""
        for work in self._opening:
            work.wait(timeout)
        return int(self._heard[0])

    def finish(self, timeout: timedelta) -> None:
        """Wait for the data."""
        for work in self._rest:
            work.wait(timeout)
        at = 1
        for room in self._inside:
            room.copy_(self._heard[at : at + len(room)])
            at += len(room)
