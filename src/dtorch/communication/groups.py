"""Two workers on different hosts: what travels goes through a process group of PyTorch that the two have to themselves.

A pair of which one refuses is left as it is, with what is under way on it, and the next meeting makes a new one.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .peers import PeerLost, Post

GO, REFUSE = 1, 0

POLL_S = 0.1
MEETING_S = 0.001

BLOCK_NBYTES = 4 << 10
"""What goes along with the word that opens an exchange. Its size is fixed, for who refuses does not know what was to come."""


class Waiter:
    """Waits for works that have no way out, in a thread of its own, so that who is in need of them can leave."""

    def __init__(self, timeout_s: float, broken: Callable[[], bool]) -> None:
        self._timeout, self._broken = timedelta(seconds=timeout_s), broken
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        # It may be left waiting for good, and must not keep the process.
        threading.Thread(target=self._work, name="dtorch-waiter", daemon=True).start()

    def meet(self, peer: int, rank: int, address: str, subject: str, post: Post) -> GroupPair:
        """Meet another worker, by telling each other by post where each listens."""
        store: Any = dist.HashStore()
        told = False

        def tell() -> None:
            nonlocal told
            if not told and (keys := store.list_keys()):
                told = True
                post.send(peer, subject, b"\0".join([keys[0].encode(), store.get(keys[0])]))
            # Only then, for the first key in the store is to be its own.
            if told and (heard := post.receive(peer, subject)) is not None:
                key, _, value = heard.partition(b"\0")
                store.set(key.decode(), value)

        return self._done(peer, lambda: GroupPair(store, rank, address, self._timeout), tell, MEETING_S)

    def wait(self, peer: int, works: Sequence[Any]) -> None:
        """Wait for works that depend on another worker."""
        self._done(peer, lambda: [work.wait(self._timeout) for work in works])

    def close(self) -> None:
        """End the thread, once it waits no more."""
        self._queue.put(None)

    def _done(
        self, peer: int, job: Callable[[], Any], meanwhile: Callable[[], None] = lambda: None, poll_s: float = POLL_S
    ) -> Any:
        done: Future[Any] = Future()
        self._queue.put((job, done))
        while not self._broken():
            try:
                return done.result(poll_s)
            except TimeoutError:
                meanwhile()
            except RuntimeError as error:
                raise PeerLost(peer) from error
        raise PeerLost(peer)

    def _work(self) -> None:
        while (given := self._queue.get()) is not None:
            job, done = given
            try:
                done.set_result(job())
            except Exception as error:
                done.set_exception(error)


class GroupPair:
    """The connection of two workers. Messages each way are numbered, which tells them apart."""

    def __init__(self, store: dist.Store, rank: int, address: str, timeout: timedelta) -> None:
        self.group: Any = dist.ProcessGroupGloo(store, rank, 2, options(address, timeout))
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


def options(address: str, timeout: timedelta) -> Any:
    """Options of a group that meets at an address of this host. Without them it would be the host name's, often loopback."""
    gloo: Any = dist.ProcessGroupGloo
    given = gloo._Options()
    given._devices = [gloo.create_device(hostname=address)]
    given._timeout = timeout
    return given


class Talk:
    """One exchange of a pair, under way."""

    def __init__(self, peer: int, pair: GroupPair, sends: list[Tensor], rooms: list[Tensor], word: int = GO) -> None:
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

    def opened(self, waiter: Waiter) -> int:
        """What the other said; waits for it."""
        waiter.wait(self.peer, self._opening)
        return int(self._heard[0])

    def finish(self, waiter: Waiter) -> None:
        """Wait for the data."""
        if self._rest:
            waiter.wait(self.peer, self._rest)
        at = 1
        for room in self._inside:
            room.copy_(self._heard[at : at + len(room)])
            at += len(room)
