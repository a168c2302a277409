"""Workers that acknowledge what they get and compute nothing: what is left is the way to them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import msgspec
import zmq

from ..cluster.connection import own_controller
from ..cluster.keys import Keys
from ..cluster.node import VERSIONS
from ..controller.service import Service
from ..core.control import CLOSE, DONE, HELLO, READY, REPLY, REQUEST, START, SUBMIT, Head, Hello, Sign, Start, WorkerInfo
from ..core.program import Reply
from ..tensor.client import Client
from ..transport.line import ACKNOWLEDGED_AFTER_MS, is_time
from ..transport.messages import encode_reply
from ..transport.wire import body, connect, headed, parsed
from .sessions import in_place


class Stubs(msgspec.Struct, frozen=True):
    """What a process of stubs is told: one line of JSON."""

    address: str
    workers: int
    keys: dict[str, str]


@contextmanager
def stub_session(workers: int) -> Iterator[Client]:
    """A session of so many stubs in place of the running one, which comes back afterwards."""
    connection, keys, address = own_controller(0)
    task = Stubs(address, workers, msgspec.structs.asdict(keys))
    process = subprocess.Popen([sys.executable, "-m", __name__], stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(task) + b"\n")
    process.stdin.flush()
    try:
        start = connection.begin(workers, {}, 1)
        with in_place(Client(Service(connection, hosting=start.hosting, travels=True), lambda mesh: None)) as client:
            yield client
    finally:
        connection.close()
        process.kill()
        process.wait()
        process.stdin.close()


class _Stub:
    def __init__(self, context: zmq.Context, task: Stubs, place: int) -> None:
        self.name, self.count, self.acknowledged, self.number, self.epoch = f"stub.{place}.0", 0, 0, 0, 0
        self.socket = connect(context, task.address, self.name, Keys(**task.keys).line)  # type: ignore[arg-type]
        hello = Hello("worker", self.name, VERSIONS, [WorkerInfo(self.name, "here", 1, "127.0.0.1")])
        self.socket.send_multipart(headed(Head(HELLO), hello))

    def take(self) -> bool:
        """Do about a message what a worker does, but compute nothing; False when told to end."""
        frames = self.socket.recv_multipart(copy=False)
        head = parsed(frames[0])
        if head.kind == START:
            start = body(frames, Start)
            self.count, self.acknowledged, self.epoch = 0, 0, head.epoch
            self.number = [worker.name for worker in start.workers].index(self.name)
            self.socket.send_multipart(headed(Head(READY, head.epoch, [self.number]), Sign("", "")))
        elif head.kind in (SUBMIT, REQUEST):
            self.count += 1
            if head.kind == REQUEST:
                self.socket.send_multipart([*headed(Head(REPLY, self.epoch, [self.number], self.count)), *encode_reply(Reply())])
                self.acknowledged = self.count
            elif is_time(self.count, frames):
                self.acknowledge()
        return head.kind != CLOSE

    def acknowledge(self) -> None:
        """Tell what has run, where that is news."""
        if self.count > self.acknowledged:
            self.acknowledged = self.count
            self.socket.send_multipart(headed(Head(DONE, self.epoch, [self.number], self.count)))


def main() -> None:
    """Be stubs until told to end."""
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=Stubs)
    context, poller = zmq.Context(), zmq.Poller()
    stubs = {stub.socket: stub for stub in map(partial(_Stub, context, task), range(task.workers))}
    for socket in stubs:
        poller.register(socket, zmq.POLLIN)
    while stubs:
        ready = poller.poll(ACKNOWLEDGED_AFTER_MS)
        if not ready:
            for stub in stubs.values():
                stub.acknowledge()
            ready = poller.poll()
        for socket, _ in ready:
            if not stubs[socket].take():
                poller.unregister(socket)
                del stubs[socket]
    context.destroy(0)


if __name__ == "__main__":
    main()
