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


class ProcessPeers:
    """Peers over pairwise process groups, made when two workers first meet.

    A word goes each way before anything else counts: a pair of which one refuses is left as it is, with what is under way on
    it, and the next meeting makes a new one.

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
        pairs = {peer: self._pair(peer) for peer in sorted(peers)}
        words = {peer: pair.say(GO) for peer, pair in pairs.items()}
        works: dict[int, list[Any]] = {peer: [] for peer in pairs}
        for peer, tensor in sends:
            works[peer].append(pairs[peer].send(tensor))
        for peer, tensor in receives:
            works[peer].append(pairs[peer].receive(tensor))
        refused = {peer for peer, word in words.items() if word.heard(self._timeout) == REFUSE}
        for peer, under_way in works.items():
            if peer in refused:
                self._leave(peer)
                continue
            for work in under_way:
                work.wait(self._timeout)
        return refused

    def refuse(self, peers: Collection[int]) -> None:
        """See ``Peers``."""
        words = [self._pair(peer).say(REFUSE) for peer in sorted(peers)]
        for word in words:
            word.heard(self._timeout)
        for peer in peers:
            self._leave(peer)

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

    def say(self, word: int) -> _Word:
        """Exchange a word."""
        said, heard = torch.tensor([word], dtype=torch.uint8), torch.empty(1, dtype=torch.uint8)
        return _Word(self.send(said), self.receive(heard), said, heard)

    def send(self, tensor: Tensor) -> Any:
        """Send bytes; they must stay as they are until the work is done."""
        self.sent += 1
        return self.group.send([tensor], self.other, self.sent)

    def receive(self, tensor: Tensor) -> Any:
        """Fill a tensor with what comes."""
        self.received += 1
        return self.group.recv([tensor], self.other, self.received)


class _Word:
    def __init__(self, sent: Any, received: Any, *tensors: Tensor) -> None:
        self._works, self._tensors = (sent, received), tensors

    def heard(self, timeout: timedelta) -> int:
        """What the other said."""
        for work in self._works:
            work.wait(timeout)
        return int(self._tensors[1])
