"""The client's end of a session: one link over which batches go to all workers, and their replies come back.

A thread owns the socket. What it is to send comes to it through a queue.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

import msgspec
import zmq

from ..core.control import (
    CLOSE,
    DONE,
    END,
    HELLO,
    LOG,
    LOST,
    REFUSED,
    REPLY,
    REQUEST,
    SUBMIT,
    WAITING,
    WELCOME,
    Head,
    Hello,
    Record,
    Start,
)
from ..core.errors import ProtocolError, SessionClosedError, four_parts
from ..core.interrupts import Allowed
from ..core.program import PendingReply, Reply
from .base import Part
from .frames import Frame
from .messages import decode_reply, deflated, encode_batch
from .wire import LINGER_MS, Key, body, connect, headed, parsed

log = logging.getLogger("dtorch.trunk")

CREDITS = 64
"""Batches that may be under way before ``submit`` waits."""

CREDIT_NBYTES = 256 << 20
"""Bytes that may be under way before ``submit`` waits, beside one batch of any size."""


QUIET_S = 10.0
"""Who waits for longer is told for what."""


class Trunk:
    """A ``Network`` to the workers of a session, through whoever listens at an address.

    Args:
        lost: makes the error for a worker that is gone, of its number (None for the listener itself) and how it went.
        logged: called with each log record of the session's processes, from the link's thread, which it must not hold up.

    Attributes:
        there: how many workers there were while a session could not begin for want of more.
    """

    def __init__(
        self,
        address: str,
        name: str,
        key: Key,
        lost: Callable[[int | None, str], BaseException],
        logged: Callable[[Record], None] = lambda record: None,
    ) -> None:
        self._context = zmq.Context()
        self._socket = connect(self._context, address, name, key)
        self._make_lost, self._logged = lost, logged
        self._wake_in, self._wake_out = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._wake_in.bind("inproc://wake")
        self._wake_out.connect("inproc://wake")
        self._waking = threading.Lock()
        self._queue: deque[list[Any]] = deque()
        self._flow = Flow(0, 0)
        self._welcome: Future[Start] = Future()
        self.there = self._asked = 0
        self._thread = threading.Thread(target=self._run, name="dtorch-trunk", daemon=True)
        self._thread.start()

    def start(self, hello: Hello, timeout_s: float) -> Start:
        """Begin a session; what is left of an earlier one ends.

        Raises:
            TimeoutError: there were not enough workers in time.
            ProtocolError: it was refused.
        """
        self._flow.lose(_over("reset()"))
        self._welcome = Future()
        # Of a start that was interrupted the welcome may be on its way still, and that session ends with this one's begin.
        self._asked += 1
        self._push(headed(Head(HELLO), msgspec.structs.replace(hello, asked=self._asked)))
        try:
            return self._welcomed(timeout_s, hello.wanted)
        except TimeoutError:
            # Nobody waits any more for a session that might begin later.
            self._push(headed(Head(END)))
            raise

    def _welcomed(self, timeout_s: float, wanted: int) -> Start:
        if timeout_s > QUIET_S:
            with suppress(TimeoutError):
                return self._welcome.result(QUIET_S)
            timeout_s -= QUIET_S
            some = f"{self.there or 'no'} workers are there" + (f", of {wanted}" if wanted else "")
            log.warning("%s; waiting for them for up to %.0f s more", some, timeout_s)
        return self._welcome.result(timeout_s)

    def submit(self, first: int, parts: Sequence[Part]) -> None:
        """Send a batch; waits while workers are far behind."""
        self._send(SUBMIT, first, parts)

    def request(self, first: int, parts: Sequence[Part]) -> list[PendingReply]:
        """Send a batch whose last instruction each worker answers."""
        replies: list[Future[Reply]] = [Future() for _ in range(self._flow.workers)]
        for reply in replies:
            reply.set_running_or_notify_cancel()
        self._send(REQUEST, first, parts, replies)
        return list(replies)

    def close(self, everything: bool = False) -> None:
        """End the link, and with ``everything`` the listener and all workers as well."""
        self._flow.lose(_over("shutdown()"))
        self._push(headed(Head(CLOSE if everything else END, self._flow.epoch)))
        self._push([])
        self._thread.join()
        self._context.destroy(LINGER_MS)

    def lose(self, worker: int | None, how: str) -> None:
        """Whoever waits or calls is told that a worker, or the listener, is gone."""
        why = self._make_lost(worker, how)
        self._flow.lose(why)
        self._give_up(why)

    def _give_up(self, why: BaseException) -> None:
        """Whoever waits for the session to begin is told that it does not."""
        with suppress(InvalidStateError):
            self._welcome.set_exception(why)

    def _send(self, kind: str, first: int, parts: Sequence[Part], replies: Sequence[Future[Reply]] = ()) -> None:
        flow, messages = self._flow, []
        # A batch goes to all or, where it cannot be encoded, to nobody.
        for workers, batch in parts:
            head = Head(kind, flow.epoch, [] if len(workers) == flow.workers else list(workers))
            messages.append([*headed(head), *encode_batch(first, batch)])
        nbytes = sum(len(frame) for message in messages for frame in message)
        flow.sending(nbytes, replies, lambda: self._push(*messages))

    def _push(self, *messages: list[Any]) -> None:
        self._queue.extend(messages)
        with self._waking:
            self._wake_out.send(b"")

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            # Whoever waits would wait for ever.
            self.lose(None, f"cannot be spoken to any more, for the link's thread has ended: {error!r}")
            raise

    def _work(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_in, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._wake_in in ready:
                self._wake_in.recv()
                while self._queue:
                    frames = self._queue.popleft()
                    if not frames:
                        return
                    # Here, where it takes no time of who issues operators.
                    if len(frames) > 1:
                        frames[1] = deflated(frames[1])
                    self._socket.send_multipart(frames, copy=False)
            if self._socket in ready:
                frames = self._socket.recv_multipart(copy=False)
                try:
                    self._handle(parsed(frames[0]), frames)
                except ProtocolError as error:
                    log.warning("a message was dropped: %s", error)

    def _handle(self, head: Head, frames: list[zmq.Frame]) -> None:
        if head.kind == WELCOME and head.count != self._asked:
            return
        if head.kind == WELCOME:
            start = body(frames, Start)
            self._flow = Flow(head.epoch, len(start.workers))
            # Who has been given up meanwhile is welcome no more.
            with suppress(InvalidStateError):
                self._welcome.set_result(start)
        elif head.kind == WAITING:
            self.there = head.count
        elif head.kind == REFUSED:
            self._give_up(ProtocolError(body(frames, str)))
        elif head.kind == LOG:
            # Also before the session is on.
            self._logged(body(frames, Record))
        elif head.epoch != self._flow.epoch or max(head.workers, default=0) >= self._flow.workers:
            return
        elif head.kind == DONE:
            self._flow.done(head.count)
        elif head.kind == REPLY and head.workers:
            self._flow.answered(head.workers[0], [f.buffer for f in frames[1:]])
        elif head.kind == LOST and head.workers:
            # A session that is about to begin in place of this one begins without the worker.
            self._flow.lose(self._make_lost(head.workers[0], body(frames, str)))


def _over(what: str) -> SessionClosedError:
    """The error for values that were on their way when their session ended."""
    given, rule = (
        "a value on its way from a session that has ended",
        "what is not there when a session ends does not come any more",
    )
    where, remedy = (
        f"dtorch.session().reset() or dtorch.shutdown(): here {what}",
        "get values first, or make tensors anew and compute them again",
    )
    return SessionClosedError(four_parts(given, rule, where, remedy))


class Flow:
    """What is under way to the workers of one session."""

    def __init__(self, epoch: int, workers: int) -> None:
        self.epoch, self.workers = epoch, workers
        self._changed = threading.Condition()
        self._sent = self._done = 0
        # Sizes of batches that count for more than one credit, with the number that has to be done first.
        self._heavy: deque[tuple[int, int]] = deque()
        self._waiting: list[deque[Future[Reply]]] = [deque() for _ in range(workers)]
        self._lost: BaseException | None = None

    def sending(self, nbytes: int, replies: Sequence[Future[Reply]], push: Callable[[], None]) -> None:
        """Send a batch as soon as there is credit.

        Raises:
            What ``lose`` was given.
        """
        with self._changed:
            try:
                with Allowed():
                    self._changed.wait_for(self._may_send)
            finally:
                # An interrupt ends the wait, but the batch has to go: what comes after builds on it.
                if self._lost is None:
                    self._sent += 1
                    if nbytes > CREDIT_NBYTES // CREDITS:
                        self._heavy.append((self._sent, nbytes))
                    for waiting, reply in zip(self._waiting, replies, strict=bool(replies)):
                        waiting.append(reply)
                    push()
            if self._lost is not None:
                raise self._lost

    def done(self, count: int) -> None:
        """All workers have run so many batches."""
        with self._changed:
            self._done = count
            while self._heavy and self._heavy[0][0] <= count:
                self._heavy.popleft()
            self._changed.notify_all()

    def answered(self, worker: int, frames: Sequence[Frame]) -> None:
        """A worker has answered the earliest request that it has not."""
        with self._changed:
            # Of workers that were given up nobody waits for answers.
            reply = self._waiting[worker].popleft() if self._waiting[worker] else None
        if reply is not None:
            try:
                reply.set_result(decode_reply(frames))
            except Exception as error:
                reply.set_exception(error)

    def lose(self, why: BaseException) -> None:
        """Nothing will come any more, and nothing may be sent."""
        with self._changed:
            self._lost = self._lost or why
            waiting = [reply for queue in self._waiting for reply in queue]
            for queue in self._waiting:
                queue.clear()
            self._changed.notify_all()
        for reply in waiting:
            reply.set_exception(why)

    def _may_send(self) -> bool:
        light = self._sent - self._done < CREDITS and sum(nbytes for _, nbytes in self._heavy) < CREDIT_NBYTES
        return light or self._lost is not None
