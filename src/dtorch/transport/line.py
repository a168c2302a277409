"""A worker's end: it takes what comes, one message after the other, and runs the batches of the session that is on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import zmq

from ..core.control import CLOSE, DONE, END, HELLO, READY, REFUSED, REPLY, REQUEST, START, SUBMIT, Head, Hello, Start
from ..core.errors import ProtocolError
from .base import Runner
from .messages import decode_batch, encode_reply
from .wire import LINGER_MS, Key, body, connect, headed, parsed


class Line:
    """The link of one worker.

    Args:
        open_session: makes the runner for a session of its number, epoch and ``Start``.

    Attributes:
        count: batches that have run in this session.
        busy_since: when the batch at hand was begun, by the monotonic clock; None when idle.
    """

    def __init__(self, address: str, hello: Hello, key: Key, open_session: Callable[[int, int, Start], Runner]) -> None:
        self._context = zmq.Context()
        self._socket = connect(self._context, address, hello.name, key)
        self._hello, self._open = hello, open_session
        self._runner: Runner | None = None
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
            elif head.epoch == self._epoch and self._runner is not None:
                self.busy_since = time.monotonic()
                self._run(head, frames, self._runner)
                self.busy_since = None
            del frames
        self._leave()
        self._context.destroy(LINGER_MS)

    def _start(self, epoch: int, start: Start) -> None:
        self._leave()
        self._epoch, self.count = epoch, 0
        self._number = [worker.name for worker in start.workers].index(self._hello.name)
        self._runner = self._open(self._number, epoch, start)
        self._send(headed(Head(READY, epoch, [self._number])))

    def _run(self, head: Head, frames: list[zmq.Frame], runner: Runner) -> None:
        if head.kind == END:
            self._leave()
            return
        first, batch = decode_batch([frame.buffer for frame in frames[1:]])
        self.count += 1
        if head.kind == REQUEST:
            reply = encode_reply(runner.run(first, batch))
            self._send([*headed(Head(REPLY, self._epoch, [self._number], self.count)), *reply])
        elif head.kind == SUBMIT:
            runner.submit(first, batch)
            self._send(headed(Head(DONE, self._epoch, [self._number], self.count)))

    def _leave(self) -> None:
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def _send(self, frames: list[Any]) -> None:
        self._socket.send_multipart(frames, copy=False)
