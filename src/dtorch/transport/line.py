"""A worker's end: it takes what comes, one message after the other, and runs the batches of the session that is on."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import zmq

from ..core.control import (
    CLOSE,
    DONE,
    END,
    HELLO,
    LOG,
    MEET,
    READY,
    REFUSED,
    REPLY,
    REQUEST,
    START,
    SUBMIT,
    Head,
    Hello,
    Record,
    Sign,
    Start,
)
from ..core.errors import ProtocolError
from .base import Runner
from .messages import decode_batch, encode_reply
from .wire import LINGER_MS, Key, body, connect, headed, parsed

IDLE_MS = 200
"""How long a record may wait that another thread has logged, when nothing comes."""

ACKNOWLEDGED_TOGETHER = 8
"""So many batches are acknowledged by one message while one follows the other."""

ACKNOWLEDGED_AFTER_MS = 2
"""When none follows for so long, what has run is acknowledged."""

WITHOUT_VALUES = 2
"""Frames of a batch that carries no tensor. One that does may take up the client's whole credit."""

MOST_RECORDS = 1000
"""How many of them may wait."""


class Part(Protocol):
    """A worker's part in a session."""

    @property
    def runner(self) -> Runner:
        """What runs its batches."""

    @property
    def sign(self) -> Sign:
        """How the others find it."""

    def introduce(self, signs: list[Sign]) -> None:
        """How it finds the others, by number."""

    def close(self) -> None:
        """Release everything."""


class Line:
    """The link of one worker.

    Args:
        take_part: makes its part in a session, of its number, the epoch and ``Start``.

    Attributes:
        count: batches that have run in this session.
        busy_since: when the batch at hand was begun, by the monotonic clock; None when idle.
    """

    def __init__(self, address: str, hello: Hello, key: Key, take_part: Callable[[int, int, Start], Part]) -> None:
        self._context = zmq.Context()
        self._socket = connect(self._context, address, hello.name, key)
        self._hello, self._take_part = hello, take_part
        self._part: Part | None = None
        self._epoch = self._number = self.count = self._acknowledged = 0
        self.busy_since: float | None = None
        self._records: deque[list[bytes]] = deque()
        self._thread = threading.get_ident()
        self._logs = self._sending = False

    def serve(self) -> None:
        """Work until told to end.

        Raises:
            ProtocolError: it was not let in.
        """
        self._thread = threading.get_ident()
        self._send(headed(Head(HELLO), self._hello))
        while True:
            if self.count > self._acknowledged and not self._socket.poll(ACKNOWLEDGED_AFTER_MS):
                self._acknowledge()
            while self._logs and not self._socket.poll(IDLE_MS):
                self._send()
            frames = self._socket.recv_multipart(copy=False)
            head = parsed(frames[0])
            if head.kind == CLOSE:
                break
            if head.kind == REFUSED:
                raise ProtocolError(body(frames, str))
            if head.kind == START:
                self._start(head.epoch, body(frames, Start))
            elif head.epoch == self._epoch and self._part is not None:
                self.busy_since = time.monotonic()
                self._run(head, frames, self._part)
                self.busy_since = None
            if is_time(self.count, frames):
                self._acknowledge()
            del frames
        self._leave()
        self._context.destroy(LINGER_MS)

    def log(self, record: Record) -> bool:
        """Send a log record up, before whatever is answered later: at once, or of another thread than the link's when that is
        between batches. False where too many wait.
        """
        if len(self._records) >= MOST_RECORDS:
            return False
        self._records.append(headed(Head(LOG, self._epoch, [self._number]), record))
        # What Python calls in the middle of a message, such as a finalizer, may log too.
        if threading.get_ident() == self._thread and not self._sending:
            self._send()
        return True

    def _start(self, epoch: int, start: Start) -> None:
        self._leave()
        self._epoch, self.count, self._acknowledged = epoch, 0, 0
        self._number = [worker.name for worker in start.workers].index(self._hello.name)
        self._part = self._take_part(self._number, epoch, start)
        self._logs = start.log_level is not None
        self._send(headed(Head(READY, epoch, [self._number]), self._part.sign))

    def _run(self, head: Head, frames: list[zmq.Frame], part: Part) -> None:
        if head.kind == END:
            self._leave()
            return
        if head.kind == MEET:
            part.introduce(body(frames, list[Sign]))
            return
        runner = part.runner
        first, batch = decode_batch([frame.buffer for frame in frames[1:]])
        self.count += 1
        if head.kind == REQUEST:
            reply = encode_reply(runner.run(first, batch))
            self._acknowledged = self.count
            self._send([*headed(Head(REPLY, self._epoch, [self._number], self.count)), *reply])
        elif head.kind == SUBMIT:
            runner.submit(first, batch)

    def _acknowledge(self) -> None:
        if self.count > self._acknowledged:
            self._acknowledged = self.count
            self._send(headed(Head(DONE, self._epoch, [self._number], self.count)))

    def _leave(self) -> None:
        if self._part is not None:
            self._part.close()
            self._part, self._logs = None, False

    def _send(self, frames: Sequence[Any] = ()) -> None:
        self._sending = True
        try:
            while self._records:
                self._socket.send_multipart(self._records.popleft())
            if frames:
                self._socket.send_multipart(frames, copy=False)
        finally:
            self._sending = False


def is_time(count: int, frames: Sequence[Any]) -> bool:
    """Whether a worker tells at once, after the message of these frames, that it has run ``count`` batches."""
    return not count % ACKNOWLEDGED_TOGETHER or len(frames) > WITHOUT_VALUES
