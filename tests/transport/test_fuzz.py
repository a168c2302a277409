"""Whatever comes to a node's or a worker's port: it goes on, and drops what it cannot read."""

from __future__ import annotations

import random
import socket
import threading

import pytest
import zmq

from dtorch.cluster.keys import Keys
from dtorch.cluster.node import VERSIONS
from dtorch.core.control import DONE, END, GONE, HELLO, LOG, READY, SUBMIT, Gone, Head, Hello, Origin, Record, Sign, WorkerInfo
from dtorch.core.errors import ProtocolError
from dtorch.core.program import Call, Calls, Fetch, Free, Reply
from dtorch.transport.messages import decode_batch, deflated, encode_batch, encode_reply
from dtorch.transport.post import MOST_NBYTES, Post
from dtorch.transport.wire import connect, headed
from tests.cluster.mutations import mutated
from tests.transport.runners import Recorder
from tests.transport.test_trunk import WAIT_S, Cluster, cluster  # noqa: F401
from tests.worker.plans import ONE

MESSAGES = 100_000

ORIGIN = Origin(title="worker", name="odd.0.0", host="here", pid=1, worker=0)


def seeds() -> list[list[bytes]]:
    """One of each message, of a session that is on and of none."""
    one = WorkerInfo("odd.0.0", "here", 1, "127.0.0.1", {"cpu": 2})
    told: list[list[bytes]] = []
    for epoch in (0, 1):
        told += [
            headed(Head(HELLO, epoch), Hello("worker", "odd.0.0", VERSIONS, [one])),
            headed(Head(HELLO, epoch), Hello("agent", "odd", VERSIONS, [one, one])),
            headed(Head(HELLO, epoch), Hello("client", "odd", VERSIONS, wanted=9)),
            headed(Head(GONE, epoch), Gone("test.7.0", "fell off")),
            headed(Head(READY, epoch, [3]), Sign("a", "b")),
            headed(Head(DONE, epoch, [0], 1)),
            headed(Head(END, epoch)),
            headed(Head(LOG, epoch, [0]), Record(origin=ORIGIN, level=20, name="odd", text="a record")),
            [*headed(Head(SUBMIT, epoch, [0])), *map(bytes, encode_batch(0, [Free([1])]))],
        ]
    return told


@pytest.mark.timeout(300)
def test_mutated_messages_to_a_controller(cluster: Cluster) -> None:  # noqa: F811
    recorder = Recorder()
    cluster.worker(0, recorder)
    trunk, _ = cluster.client()
    chance, told = random.Random(0), seeds()
    odd = connect(zmq.Context.instance(), cluster.relay.address, "odd", cluster.lock.key)
    odd.set(zmq.LINGER, -1)
    for _ in range(MESSAGES):
        odd.send_multipart([mutated(frame, chance) for frame in chance.choice(told)])
    odd.close()
    reached = threading.Event()
    while not reached.wait(0.05):
        # Once all are read, so is this.
        cluster.relay.call(lambda: reached.set() if cluster.relay.passed[0] > MESSAGES else None)
    assert cluster.relay.dropped > MESSAGES / 2
    # Its own session is as it was.
    (reply,) = trunk.request(7, [((0,), [Fetch(5, ONE, [])])])
    assert reply.result(WAIT_S).result == [5, 1]
    assert recorder.batches == [(7, [Fetch(5, ONE, [])])]


def test_garbage_on_the_bare_port(cluster: Cluster) -> None:  # noqa: F811
    chance = random.Random(1)
    greeting = bytes.fromhex("ff00000000000000017f0300") + b"CURVE" + bytes(15) + b"\0" * 32
    host, _, port = cluster.relay.address.removeprefix("tcp://").rpartition(":")
    for _ in range(5_000):
        with socket.create_connection((host, int(port)), WAIT_S) as link:
            link.sendall(mutated(chance.choice((b"", greeting)) + chance.randbytes(chance.choice((1, 64, 400))), chance) or b"x")
    cluster.worker(0, Recorder())
    trunk, _ = cluster.client()
    assert trunk.request(7, [((0,), [Fetch(5, ONE, [])])])[0].result(WAIT_S).result == [5, 1]


def test_mutated_letters() -> None:
    keys, chance = Keys.generate(), random.Random(2)
    box, other = Post(0, "127.0.0.1", keys.lock), Post(1, "127.0.0.1", keys.lock)
    for post in (box, other):
        post.introduce([box.address, other.address])
    odd = connect(zmq.Context.instance(), box.address, "odd", keys.line)
    unnumbered = connect(zmq.Context.instance(), box.address, "17", keys.line)
    for number in range(MESSAGES):
        parts = [mutated(part, chance) for part in (b"0-1-1", b"key\0value")]
        (odd if number % 2 else unnumbered).send_multipart(chance.choice((parts, parts[:1], [*parts, b"more"])))
        if number % 100 == 0:
            assert box.receive(1, "0-1-1") is None
    unnumbered.send_multipart([b"0-1-1", bytes(MOST_NBYTES + 1)])
    other.send(0, "0-1-1", b"here I am")
    waited = threading.Event()
    while (letter := box.receive(1, "0-1-1")) is None:
        waited.wait(0.01)
    assert letter == b"here I am"
    for closed in (odd, unnumbered):
        closed.close(0)
    box.close()
    other.close()


def test_mutated_batches_and_replies_are_refused_or_read() -> None:
    chance = random.Random(3)
    batch = [Calls.of(*(Call(7, [n], [n + 1], [0.5]) for n in range(200))), Free([1, 2, 3]), Fetch(5, ONE, [0])]
    plain = [bytes(frame) for frame in encode_batch(3, batch)]
    told = [plain, [bytes(deflated(plain[0]))], [bytes(frame) for frame in encode_reply(Reply(4))]]
    refused = 0
    for _ in range(MESSAGES // 10):
        frames = [mutated(frame, chance) for frame in chance.choice(told)]
        try:
            decode_batch(frames)
        except ProtocolError:
            refused += 1
    assert refused > MESSAGES / 20
