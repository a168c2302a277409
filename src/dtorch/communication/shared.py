"""Two workers on one host: what travels is copied once into memory that both have, and once out of it.

A socket carries single bytes that say what there is. They keep the two in step, so nothing else guards the memory.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .peers import PeerLost

GO, REFUSE, FULL, FREE = b"G", b"R", b"d", b"c"

OPENING_NBYTES = 256 << 10
"""What goes along with the word that opens an exchange; there is room for two, for the other may still read the last."""

SLOT_NBYTES, SLOTS = 512 << 10, 4
"""Parts in which the rest goes, and how many may be under way."""

LANE_NBYTES = 2 * OPENING_NBYTES + SLOTS * SLOT_NBYTES


def new_memory() -> int:
    """A file descriptor of memory for a pair. It has no name, and is gone with the last who has it."""
    fd = os.memfd_create("dtorch-pair")
    os.ftruncate(fd, 2 * LANE_NBYTES)
    return fd


class SharedPair:
    """A socket and memory that two workers have in common.

    Args:
        link: a connected stream socket.
        memory: a file descriptor from ``new_memory``; it is closed here.
        first: whether this worker sends in the first half of it.
    """

    def __init__(self, link: socket.socket, memory: int, *, first: bool) -> None:
        link.setblocking(False)
        self.link, self.exchanges = link, 0
        both = torch.frombuffer(mmap.mmap(memory, 2 * LANE_NBYTES), dtype=torch.uint8).split(LANE_NBYTES)
        os.close(memory)
        self._out, self._in = both if first else both[::-1]

    def room(self, number: int, *, out: bool) -> Tensor:
        """Where a part of an exchange lies, on its way out or in: 0 is what opens it."""
        lane = self._out if out else self._in
        if number == 0:
            return lane.narrow(0, self.exchanges % 2 * OPENING_NBYTES, OPENING_NBYTES)
        return lane.narrow(0, 2 * OPENING_NBYTES + number % SLOTS * SLOT_NBYTES, SLOT_NBYTES)

    def abort(self) -> None:
        """End every wait for the other, from any thread."""
        try:
            self.link.shutdown(socket.SHUT_RDWR)
        except OSError:
            # The other has hung up.
            return

    def close(self) -> None:
        """Hang up."""
        self.link.close()


class Flow:
    """One exchange of a pair, under way: a machine that goes as far as it can whenever it is asked to.

    Attributes:
        done: nothing is left to do.
        refused: the other had nothing to give.
    """

    def __init__(self, peer: int, pair: SharedPair, sends: Sequence[Tensor], rooms: Sequence[Tensor], word: bytes = GO) -> None:
        self.peer, self.pair, self._word = peer, pair, word
        self._sends, self._rooms = parts(sends), parts(rooms)
        self._heard = b""
        self._sent = self._taken = self._freed = 0
        # The first slots are free; what is freed beyond the need is not told.
        self._frees = max(0, len(self._sends) - 1 - SLOTS)
        self._unsaid = b""
        if word == GO and self._sends:
            self._fill(0)
        self._sent = 1
        self._say(word)

    @property
    def refused(self) -> bool:
        """Whether the other had nothing to give."""
        return self._heard == REFUSE

    @property
    def events(self) -> int:
        """What of its socket to wait for."""
        return select.POLLIN | (select.POLLOUT if self._unsaid else 0)

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        if not self._heard or self._unsaid:
            return False
        return REFUSE in (self._heard, self._word) or (self._sent >= len(self._sends) and self._taken >= len(self._rooms))

    def step(self) -> bool:
        """Take what has come and give what there is room for, one part at most; whether there was any."""
        moved = self._hear()
        if self._unsaid:
            self._say(b"")
        if self._heard == self._word == GO and self._sent < len(self._sends) and self._sent <= SLOTS + self._freed:
            self._fill(self._sent)
            self._sent += 1
            self._say(FULL)
            moved = True
        return moved

    def _hear(self) -> bool:
        # No more than belongs to this exchange, for what opens the next may have come.
        expected = max(1, len(self._rooms)) - max(1, self._taken) + self._frees - self._freed if self._heard else 1
        if expected <= 0:
            return False
        try:
            said = self.pair.link.recv(expected)
        except BlockingIOError:
            return False
        except OSError as error:
            raise PeerLost(self.peer) from error
        if not said:
            raise PeerLost(self.peer)
        if not self._heard:
            self._heard = said
            if self._heard == self._word == GO and self._rooms:
                self._take()
            return True
        self._freed += said.count(FREE)
        for _ in range(said.count(FULL)):
            self._take()
        return True

    def _fill(self, number: int) -> None:
        room, at = self.pair.room(number, out=True), 0
        for piece in self._sends[number]:
            room.narrow(0, at, len(piece)).copy_(piece)
            at += len(piece)

    def _take(self) -> None:
        number, at = self._taken, 0
        room = self.pair.room(number, out=False)
        for piece in self._rooms[number]:
            piece.copy_(room.narrow(0, at, len(piece)))
            at += len(piece)
        self._taken += 1
        if 0 < number < len(self._rooms) - SLOTS:
            self._say(FREE)

    def _say(self, word: bytes) -> None:
        self._unsaid += word
        try:
            self._unsaid = self._unsaid[self.pair.link.send(self._unsaid) :]
        except BlockingIOError:
            return
        except OSError as error:
            raise PeerLost(self.peer) from error


def parts(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Bytes as the parts in which they go: one stream, of which a part may have several tensors, and a tensor several parts."""
    cuts: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        at = 0
        while at < len(tensor):
            if not room:
                room = SLOT_NBYTES if cuts else OPENING_NBYTES
                cuts.append([])
            size = min(room, len(tensor) - at)
            cuts[-1].append(tensor.narrow(0, at, size))
            at, room = at + size, room - size
    return cuts


def converse(flows: Sequence[Flow], timeout_s: float, broken: Callable[[], bool]) -> None:
    """Bring flows to their end.

    Raises:
        PeerLost: one of the others is gone, or says nothing for too long.
    """
    left = [f for f in flows if not f.done]
    deadline = time.monotonic() + timeout_s
    while left:
        if broken():
            raise PeerLost(left[0].peer)
        # All take their turn, for each may be what another waits for.
        if any([f.step() for f in left]):
            deadline = time.monotonic() + timeout_s
        else:
            _wait(left, deadline)
        left = [f for f in left if not f.done]
    for flow in flows:
        flow.pair.exchanges += 1


def _wait(flows: Sequence[Flow], deadline: float) -> None:
    poll = select.poll()
    for flow in flows:
        poll.register(flow.pair.link, flow.events)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
        raise PeerLost(flows[0].peer)
