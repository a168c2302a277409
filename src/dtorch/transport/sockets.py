"""Batches to workers over ZeroMQ: a ``Hub`` on the client's side, a ``Line`` on each worker's.

Every link is encrypted, and only who knows the session's key is let in. A thread owns the hub's socket; what it is to send
comes to it through a queue. Frames of a message to a worker: kind, then those of the batch. From a worker: kind, then those
of the reply.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from ..core.errors import InternalError
from ..core.program import Instruction, PendingReply, Reply
from .frames import Frame
from .messages import decode_batch, decode_reply, encode_batch, encode_reply

SUBMIT, REQUEST, CLOSE = b"s", b"r", b"c"
HELLO, DONE, REPLY = b"h", b"d", b"a"
WATCH = b"watch"

CREDITS = 64
"""Batches that may be under way to a worker before ``submit`` waits."""

LINGER_MS = 1000
"""How long a socket that is closed tries to send what is left."""


@dataclass(frozen=True, slots=True)
class Key:
    """What lets into a session: the hub's public key, and the pair that all workers share."""

    hub_public: bytes
    worker_public: bytes
    worker_secret: bytes


class Hub:
    """The client's side of all links.

    Args:
        workers: how many there will be.
        address: where to listen, e.g. ``tcp://127.0.0.1:*``.

    Attributes:
        address: where workers find it.
        key: what they need to be let in.
    """

    def __init__(self, workers: int, address: str = "tcp://127.0.0.1:*") -> None:
        self._context = zmq.Context()
        public, secret = zmq.curve_keypair()
        self.key = Key(public, *zmq.curve_keypair())
        self._gate = ThreadAuthenticator(self._context)
        self._gate.start()
        self._gate.configure_curve_callback(credentials_provider=_Only(self.key.worker_public))
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, LINGER_MS)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.curve_server, self._socket.curve_secretkey, self._socket.curve_publickey = True, secret, public
        self._socket.bind(address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._wake_in, self._wake_out = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._wake_in.bind("inproc://wake")
        self._wake_out.connect("inproc://wake")
        self._waking = threading.Lock()
        self._queue: deque[list[Any]] = deque()
        self.links = [Link(self, number) for number in range(workers)]
        self._watched: dict[int, Callable[[], None]] = {}
        self._last: tuple[list[Instruction], list[Frame]] = [], []
        self._thread = threading.Thread(target=self._work, name="dtorch-hub", daemon=True)
        self._thread.start()

    def encoded(self, first: int, batch: list[Instruction]) -> list[Frame]:
        """The frames of a batch, which is encoded once where it goes to several workers in turn."""
        if self._last[0] is not batch:
            self._last = batch, encode_batch(first, batch)
        return self._last[1]

    def send(self, frames: list[Any]) -> None:
        """Let the thread send frames, the first of which names the worker; from any thread."""
        self._queue.append(frames)
        with self._waking:
            self._wake_out.send(b"")

    def watch(self, fd: int, then: Callable[[], None]) -> None:
        """Call ``then`` once, from the hub's thread, when a file descriptor becomes readable; it is closed afterwards."""
        self._watched[fd] = then
        self.send([WATCH, fd])

    def close(self) -> None:
        """End the thread and close the sockets."""
        self.send([])
        self._thread.join()
        self._gate.stop()
        self._context.destroy(LINGER_MS)

    def _work(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_in, zmq.POLLIN)
        going = True
        while going:
            ready = dict(poller.poll())
            if self._wake_in in ready:
                self._wake_in.recv()
            going = self._send_all(poller)
            if self._socket in ready:
                name, kind, *frames = self._socket.recv_multipart(copy=False)
                self.links[int(name.bytes)].handle(kind.bytes, [f.buffer for f in frames])
            for fd in self._watched.keys() & ready.keys():
                poller.unregister(fd)
                self._watched.pop(fd)()
                os.close(fd)
        for fd in self._watched:
            os.close(fd)

    def _send_all(self, poller: zmq.Poller) -> bool:
        """Do what is in the queue; False at its end."""
        while self._queue:
            frames = self._queue.popleft()
            if not frames:
                return False
            if frames[0] is WATCH:
                poller.register(frames[1], zmq.POLLIN)
            else:
                self._send(frames)
        return True

    def _send(self, frames: list[Any]) -> None:
        try:
            self._socket.send_multipart(frames, copy=False)
        except zmq.ZMQError as error:
            # No one of that name is connected.
            if error.errno != zmq.EHOSTUNREACH:
                raise
            number = int(frames[0])
            self.links[number].lose(InternalError(f"worker {number} is not connected"))


class _Only:
    """Lets one public key in."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a key is let in."""
        return key == self._public


class Link:
    """A ``Transport`` to one worker of a hub."""

    def __init__(self, hub: Hub, number: int) -> None:
        self._hub, self._name = hub, str(number).encode()
        self._changed = threading.Condition()
        self._under_way = 0
        self._waiting: deque[Future[Reply]] = deque()
        self._lost: BaseException | None = None
        self._there = threading.Event()

    def await_start(self, timeout_s: float) -> bool:
        """Wait for the worker to be there; False when the time is over.

        Raises:
            What ``lose`` was given: the worker is gone already.
        """
        there = self._there.wait(timeout_s)
        if self._lost is not None:
            raise self._lost
        return there

    def submit(self, first: int, batch: list[Instruction]) -> None:
        """Send a batch; waits while the worker is far behind."""
        self._send(SUBMIT, first, batch)

    def request(self, first: int, batch: list[Instruction]) -> PendingReply:
        """Send a batch whose last instruction is answered."""
        reply: Future[Reply] = Future()
        reply.set_running_or_notify_cancel()
        self._send(REQUEST, first, batch, reply)
        return reply

    def close(self) -> None:
        """Tell the worker to end."""
        self._hub.send([self._name, CLOSE])

    def lose(self, why: BaseException) -> None:
        """The worker is gone: whoever waits for it or calls it is told why, also at its start."""
        with self._changed:
            self._lost = self._lost or why
            waiting, self._waiting = list(self._waiting), deque()
            self._changed.notify_all()
        self._there.set()
        for reply in waiting:
            reply.set_exception(why)

    def handle(self, kind: bytes, frames: Sequence[Frame]) -> None:
        """What came from the worker."""
        if kind == HELLO:
            self._there.set()
            return
        with self._changed:
            self._under_way -= 1
            # Of a worker that was given up nobody waits for answers.
            reply = self._waiting.popleft() if kind == REPLY and self._waiting else None
            self._changed.notify_all()
        if reply is not None:
            try:
                reply.set_result(decode_reply(frames))
            except Exception as error:
                reply.set_exception(error)

    def _send(self, kind: bytes, first: int, batch: list[Instruction], reply: Future[Reply] | None = None) -> None:
        frames = [self._name, kind, *self._hub.encoded(first, batch)]
        with self._changed:
            self._changed.wait_for(lambda: self._under_way < CREDITS or self._lost is not None)
            if self._lost is not None:
                raise self._lost
            self._under_way += 1
            if reply is not None:
                self._waiting.append(reply)
            self._hub.send(frames)


class Line:
    """A worker's side: takes batches one after the other."""

    def __init__(self, address: str, number: int, key: Key) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, LINGER_MS)
        self._socket.identity = str(number).encode()
        self._socket.curve_serverkey = key.hub_public
        self._socket.curve_publickey, self._socket.curve_secretkey = key.worker_public, key.worker_secret
        self._socket.connect(address)

    def serve(self, runner: Any) -> None:
        """Run what comes until told to end."""
        self._socket.send(HELLO)
        while True:
            kind, *frames = self._socket.recv_multipart(copy=False)
            if kind.bytes == CLOSE:
                break
            first, batch = decode_batch([f.buffer for f in frames])
            if kind.bytes == REQUEST:
                self._socket.send_multipart([REPLY, *encode_reply(runner.run(first, batch))], copy=False)
            else:
                runner.submit(first, batch)
                self._socket.send(DONE)
            del kind, frames, batch
        runner.close()
        self._context.destroy(LINGER_MS)
