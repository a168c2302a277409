"""The sockets of a process between client and workers: children connect to it, and it may itself have a parent.

Messages are passed on as they came, without a look at more than their heads.
"""

from __future__ import annotations

import logging
import socket as sockets
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

import zmq

from ..core.control import Head
from ..core.errors import ProtocolError
from .wire import LINGER_MS, Gate, Key, Lock, connect, parsed

log = logging.getLogger("dtorch.relay")

Frames = Sequence[Any]
T = TypeVar("T")


class Handler(Protocol):
    """What is done about messages. What it raises as a ProtocolError is logged, and the message dropped."""

    def from_child(self, child: str, head: Head, frames: Frames) -> None:
        """A message of a child; ``frames`` begin with the head."""

    def from_parent(self, head: Head, frames: Frames) -> None:
        """A message of the parent."""


class Relay:
    """The loop of such a process.

    Args:
        lock: of the socket to which children connect.
        listen: where, e.g. ``tcp://127.0.0.1:*``.
        parent: address, own name and key.

    Attributes:
        address: where it listens.
        dropped: messages that could not be read.
        passed: messages and bytes that came.
    """

    def __init__(self, lock: Lock, listen: str, parent: tuple[str, str, Key] | None = None) -> None:
        self._context = zmq.Context()
        self._gate = Gate(self._context, lock)
        self._down = self._gate.listen(listen)
        self.address = self._down.getsockopt_string(zmq.LAST_ENDPOINT)
        self._up = None if parent is None else connect(self._context, *parent)
        self._wake_in, self._wake_out = sockets.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._calls: deque[Callable[[], None]] = deque()
        self._stopping = False
        self.dropped, self.passed = 0, [0, 0]

    @property
    def wake_fd(self) -> int:
        """A byte written here, by a signal for one, makes the loop go round."""
        return self._wake_out.fileno()

    def to_child(self, child: str, frames: Frames) -> bool:
        """Send to a child; False where nobody of that name is connected."""
        try:
            self._down.send_multipart([child.encode(), *frames], copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def to_parent(self, frames: Frames) -> None:
        """Send to the parent."""
        assert self._up is not None
        self._up.send_multipart(list(frames), copy=False)

    def call(self, function: Callable[[], None]) -> None:
        """Let the loop call a function; from any thread."""
        self._calls.append(function)
        self.wake()

    def ask(self, function: Callable[[], T]) -> Future[T]:
        """Let the loop call a function, and tell what it returns; from any thread."""
        answer: Future[T] = Future()

        def call() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(function())
                except Exception as error:
                    answer.set_exception(error)

        self.call(call)
        return answer

    def wake(self) -> None:
        """Let the loop go round; from any thread."""
        # Where it would block, the loop has been woken often enough; where it is closed, it has ended.
        with suppress(OSError):
            self._wake_out.send(b"\0")

    def stop(self) -> None:
        """End the loop once this round is over."""
        self._stopping = True

    def run(self, handler: Handler, each_round: Callable[[], None]) -> None:
        """Handle messages until stopped. ``each_round`` is called after each wait."""
        poller = zmq.Poller()
        for socket in (self._down, self._wake_in, *([self._up] if self._up else [])):
            poller.register(socket, zmq.POLLIN)
        while not self._stopping:
            ready = dict(poller.poll())
            if self._wake_in.fileno() in ready:
                self._wake_in.recv(1 << 12)
            while self._calls:
                self._calls.popleft()()
            if self._up is not None and self._up in ready:
                self._take(self._up.recv_multipart(copy=False), handler.from_parent)
            if self._down in ready:
                name, *frames = self._down.recv_multipart(copy=False)
                self._take(frames, partial(_of_child, handler, name.bytes))
            each_round()

    def close(self) -> None:
        """Close all sockets."""
        self._gate.close()
        self._context.destroy(LINGER_MS)
        self._wake_in.close()
        self._wake_out.close()

    def _take(self, frames: list[zmq.Frame], give: Callable[[Head, Frames], None]) -> None:
        self.passed[0] += 1
        self.passed[1] += sum(map(len, frames))
        try:
            if not frames:
                raise ProtocolError("a message without a head")
            give(parsed(frames[0]), frames)
        except (ProtocolError, UnicodeDecodeError) as error:
            self.dropped += 1
            log.warning("a message was dropped: %s", error)


def _of_child(handler: Handler, child: bytes, head: Head, frames: Frames) -> None:
    handler.from_child(child.decode(), head, frames)
