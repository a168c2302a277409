"""A worker's end: it takes what comes, one message after the other, and runs the batches of the session that is on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import zmq

from ..core.control import CLOSE, DONE, END, HELLO, MEET, READY, REFUSED, REPLY, REQUEST, START, SUBMIT, Head, Hello, Sign, Start
from ..core.errors import ProtocolError
from .base import Runner
from .messages import decode_batch, encode_reply
from .wire import LINGER_MS, Key, body, connect, headed, parsed


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
        self._epoch = self._number = self.count = 0
        self.busy_since: float | None = None

    def serve(self) -> None:
        """Work until told to end.

        Raises:
            ProtocolError: it was not let in.
        """
        self._send(headed(Head(HELLO), self._hello))
        while True:
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
            del frames
        self._leave()
        self._context.destroy(LINGER_MS)

    def _start(self, epoch: int, start: Start) -> None:
        self._leave()
        self._epoch, self.count = epoch, 0
        self._number = [worker.name for worker in start.workers].index(self._hello.name)
        self._part = self._take_part(self._number, epoch, start)
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
            self._send([*headed(Head(REPLY, self._epoch, [self._number], self.count)), *reply])
        elif head.kind == SUBMIT:
            runner.submit(first, batch)
            self._send(headed(Head(DONE, self._epoch, [self._number], self.count)))

    def _leave(self) -> None:
        if self._part is not None:
            self._part.runner.close()
            self._part = None

    def _send(self, frames: list[Any]) -> None:
        self._socket.send_multipart(frames, copy=False)
