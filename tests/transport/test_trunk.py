"""Batches over sockets, through a node that passes them on: in order, with credits, and only for those who have the key."""

from __future__ import annotations

import logging
import os
import queue
import re
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import zmq

from dtorch.cluster.head import Controller
from dtorch.cluster.keys import Keys
from dtorch.cluster.node import VERSIONS
from dtorch.core.control import CLOSE, HELLO, Head, Hello, Origin, Record, Sign, Start, WorkerInfo
from dtorch.core.errors import InternalError, ProtocolError
from dtorch.core.program import Barrier, Fetch, Free, Put
from dtorch.transport import line
from dtorch.transport.line import Line
from dtorch.transport.relay import Relay
from dtorch.transport.trunk import CREDITS, Trunk
from dtorch.transport.wire import Key, connect, headed
from tests.transport.runners import Gated, Recorder
from tests.worker.plans import ONE

WAIT_S = 20.0


class Cluster:
    """A controller in a thread, and whoever joins it."""

    def __init__(self, port: int = 0) -> None:
        self.keys = Keys.generate()
        self.lock = self.keys.lock
        self.relay = Relay(self.lock, f"tcp://127.0.0.1:{port or '*'}")
        self.controller = Controller(self.relay, self.keys, f"127.0.0.1:{port and port + 1}")
        self.threads = [threading.Thread(target=self.relay.run, args=(self.controller, lambda: None))]
        self.threads[0].start()
        self.trunks: list[Trunk] = []
        self.names: list[str] = []

    def worker(self, place: int, runner: Any) -> Line:
        name = f"test.{place}.0"
        hello = Hello("worker", name, VERSIONS, [WorkerInfo(name, "here", 1, "127.0.0.1")])
        self.names.append(name)
        made = Line(self.relay.address, hello, self.lock.key, lambda *_: Alone(runner))
        self.threads.append(threading.Thread(target=made.serve))
        self.threads[-1].start()
        return made

    def client(
        self, name: str = "client", workers: int = 0, level: int | None = None, logged: Callable[[Record], None] = id
    ) -> tuple[Trunk, Start]:
        trunk = Trunk(self.relay.address, name, self.lock.key, lambda number, how: InternalError(f"{number} {how}"), logged)
        self.trunks.append(trunk)
        return trunk, trunk.start(Hello("client", name, VERSIONS, wanted=workers, log_level=level), WAIT_S)

    def end(self) -> None:
        for trunk in self.trunks:
            trunk.close()
        # Those that were said to be gone are here all the same.
        self.relay.call(lambda: [self.relay.to_child(name, headed(Head(CLOSE))) for name in self.names])
        self.relay.call(self.controller.close)
        for thread in self.threads:
            thread.join(WAIT_S)
        self.relay.close()
        self.controller.health.close()


class Alone:
    """A part in a session that never meets another; of a list of runners it adds one."""

    sign = Sign("", "")

    def __init__(self, given: Any) -> None:
        self.runner = given
        if isinstance(given, list):
            self.runner = Recorder()
            given.append(self.runner)

    def introduce(self, signs: list[Sign]) -> None:
        assert self.sign in signs

    def close(self) -> None:
        self.runner.close()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.end()


def test_each_worker_gets_its_batches_in_order(cluster: Cluster) -> None:
    recorders = [Recorder(), Recorder(), Recorder()]
    for place in (2, 0, 1):
        cluster.worker(place, recorders[place])
    trunk, start = cluster.client(workers=3)
    assert [worker.name for worker in start.workers] == ["test.0.0", "test.1.0", "test.2.0"]
    sent: list[list[Any]] = [[], [], []]
    for n in range(3 * CREDITS):
        # To all, and to each its own, as what is put.
        parts: list[Any] = [((0, 1, 2), [Free([n])])] if n % 2 else [((w,), [Free([n + w])]) for w in range(3)]
        trunk.submit(n, parts)
        for workers, batch in parts:
            for worker in workers:
                sent[worker].append((n, batch))
    replies = trunk.request(7, [((0, 1, 2), [Barrier(), Fetch(5, ONE, [])])])
    assert [reply.result(WAIT_S).result for reply in replies] == [[5, 3 * CREDITS + 1]] * 3
    for recorder, batches in zip(recorders, sent, strict=True):
        assert recorder.batches == [*batches, (7, [Barrier(), Fetch(5, ONE, [])])]


def test_credits_hold_the_client_back(cluster: Cluster) -> None:
    gated, ahead = Gated(), threading.Semaphore(0)
    cluster.worker(0, gated)
    cluster.worker(1, Recorder())
    trunk, _ = cluster.client(workers=2)

    def run_ahead() -> None:
        for n in range(2 * CREDITS):
            trunk.submit(n, [((0, 1), [])])
            ahead.release()

    thread = threading.Thread(target=run_ahead)
    thread.start()
    for _ in range(CREDITS):
        assert ahead.acquire(timeout=WAIT_S)
    # The slowest counts.
    assert not ahead.acquire(timeout=0.1)
    gated.gate.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_a_worker_acknowledges_several_batches_together_and_soon_when_none_follows(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "ACKNOWLEDGED_AFTER_MS", 60_000)
    cluster.worker(0, Recorder())
    trunk, _ = cluster.client()
    told: queue.SimpleQueue[int] = queue.SimpleQueue()
    monkeypatch.setattr(trunk._flow, "done", told.put)
    for n in range(2 * line.ACKNOWLEDGED_TOGETHER + 3):
        trunk.submit(n, [((0,), [])])
    assert told.get(timeout=WAIT_S) == line.ACKNOWLEDGED_TOGETHER
    assert told.get(timeout=WAIT_S) == 2 * line.ACKNOWLEDGED_TOGETHER
    # Values take up credit by their bytes, so what makes room is told at once.
    trunk.submit(90, [((0,), [Put(1, ONE, [], [torch.zeros(3)])])])
    assert told.get(timeout=WAIT_S) == 2 * line.ACKNOWLEDGED_TOGETHER + 4
    monkeypatch.setattr(line, "ACKNOWLEDGED_AFTER_MS", 1)
    trunk.submit(91, [((0,), [])])
    assert told.get(timeout=WAIT_S) == 2 * line.ACKNOWLEDGED_TOGETHER + 5


def test_an_interrupt_ends_the_wait_for_credit_and_loses_no_batch(cluster: Cluster) -> None:
    gated = Gated()
    cluster.worker(0, gated)
    trunk, _ = cluster.client()
    for n in range(CREDITS):
        trunk.submit(n, [((0,), [])])
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(KeyboardInterrupt):
            trunk.submit(CREDITS, [((0,), [Free([3])])])
    finally:
        signal.signal(signal.SIGUSR1, before)
    gated.gate.set()
    trunk.request(CREDITS + 1, [((0,), [Fetch(5, ONE, [])])])[0].result(WAIT_S)
    assert [first for first, _ in gated.batches] == list(range(CREDITS + 2))


def test_what_cannot_be_encoded_goes_to_nobody(cluster: Cluster) -> None:
    recorders = [Recorder(), Recorder()]
    for place, recorder in enumerate(recorders):
        cluster.worker(place, recorder)
    trunk, _ = cluster.client(workers=2)
    with pytest.raises(TypeError):
        trunk.submit(0, [((0,), [Free([1])]), ((1,), [object()])])
    trunk.request(1, [((0, 1), [Fetch(5, ONE, [])])])[1].result(WAIT_S)
    assert [len(recorder.batches) for recorder in recorders] == [1, 1]


def test_who_waits_for_a_lost_worker_is_told(cluster: Cluster) -> None:
    gated = Gated()
    cluster.worker(0, gated)
    trunk, _ = cluster.client()
    (reply,) = trunk.request(0, [((0,), [Barrier(), Fetch(5, ONE, [])])])
    for n in range(CREDITS - 1):
        trunk.submit(n, [((0,), [])])
    told: list[str] = []

    def wait_for_credit() -> None:
        try:
            trunk.submit(0, [((0,), [])])
        except InternalError as error:
            told.append(str(error))

    thread = threading.Thread(target=wait_for_credit)
    thread.start()
    cluster.relay.call(lambda: cluster.controller.worker_ended("test.0.0", "fell off"))
    thread.join(WAIT_S)
    assert told == ["0 fell off"]
    for ask in (lambda: reply.result(WAIT_S), lambda: trunk.submit(0, [((0,), [])])):
        with pytest.raises(InternalError, match="fell off"):
            ask()
    gated.gate.set()


def test_whoever_waits_is_told_when_the_link_itself_fails(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    gated, failed = Gated(), threading.Event()
    cluster.worker(0, gated)
    trunk, _ = cluster.client()
    (reply,) = trunk.request(0, [((0,), [Fetch(5, ONE, [])])])
    monkeypatch.setattr(threading, "excepthook", lambda _: failed.set())
    monkeypatch.setattr("dtorch.transport.trunk.deflated", lambda frame: 1 // 0)
    trunk.submit(1, [((0,), [])])
    with pytest.raises(InternalError, match="ZeroDivisionError"):
        reply.result(WAIT_S)
    assert failed.wait(WAIT_S)
    gated.gate.set()


def test_the_session_of_a_start_that_was_interrupted_is_not_taken_for_a_later_one(cluster: Cluster) -> None:
    cluster.worker(0, [])
    trunk = Trunk(cluster.relay.address, "client", cluster.lock.key, lambda number, how: InternalError(how))
    cluster.trunks.append(trunk)
    hello = Hello("client", "client", VERSIONS)
    # The interrupted one, whose welcome comes when another is waited for.
    trunk._push(headed(Head(HELLO), hello))
    trunk.start(hello, WAIT_S)
    assert trunk.request(0, [((0,), [Fetch(5, ONE, [])])])[0].result(WAIT_S).result == [5, 1]


def test_a_session_that_begins_after_all_harms_nobody(cluster: Cluster) -> None:
    trunk = Trunk(cluster.relay.address, "client", cluster.lock.key, lambda number, how: InternalError(how))
    cluster.trunks.append(trunk)
    hello = Hello("client", "client", VERSIONS)
    threading.Timer(0.1, trunk.lose, (None, "has been silent")).start()
    with pytest.raises(InternalError, match="silent"):
        trunk.start(hello, WAIT_S)
    cluster.worker(0, [])
    trunk.start(hello, WAIT_S)
    assert trunk.request(0, [((0,), [Fetch(5, ONE, [])])])[0].result(WAIT_S).result == [5, 1]


def test_a_worker_that_ends_before_the_session_is_on_is_replaced(cluster: Cluster) -> None:
    name = "test.0.0"
    hello = Hello("worker", name, VERSIONS, [WorkerInfo(name, "here", 1, "127.0.0.1")])
    socket = connect(zmq.Context.instance(), cluster.relay.address, name, cluster.lock.key)
    socket.send_multipart(headed(Head(HELLO), hello))
    starting = threading.Thread(target=lambda: cluster.client(workers=2))
    starting.start()
    cluster.worker(1, Recorder())
    assert socket.poll(int(WAIT_S * 1000))
    cluster.relay.call(lambda: cluster.controller.worker_ended(name, "ended with status 1"))
    cluster.worker(0, Recorder())
    starting.join(WAIT_S)
    assert not starting.is_alive() and len(cluster.trunks) == 1
    socket.close(0)


def test_one_program_at_a_time_and_one_after_the_other(cluster: Cluster) -> None:
    made: list[Recorder] = []
    cluster.worker(0, made)
    first, _ = cluster.client("one")
    with pytest.raises(ProtocolError, match="one program at a time"):
        cluster.client("two")
    first.submit(0, [((0,), [Free([1])])])
    first.start(Hello("client", "one", VERSIONS), WAIT_S)
    assert first.request(3, [((0,), [Fetch(5, ONE, [])])])[0].result(WAIT_S).result == [5, 1]
    cluster.trunks.remove(first)
    first.close()
    cluster.client("three")
    assert [runner.closed for runner in made] == [1, 1, 0]
    assert made[0].batches == [(0, [Free([1])])]


def test_a_long_wait_for_workers_is_told(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dtorch.transport.trunk.QUIET_S", 0.5)
    cluster.worker(0, Recorder())
    trunk = Trunk(cluster.relay.address, "client", cluster.lock.key, lambda number, how: InternalError(how))
    cluster.trunks.append(trunk)
    with pytest.raises(TimeoutError):
        trunk.start(Hello("client", "client", VERSIONS, wanted=2), 1.0)
    assert re.search("workers are there, of 2; waiting for them", caplog.text)


def test_who_speaks_another_version_is_told_both(cluster: Cluster) -> None:
    trunk = Trunk(cluster.relay.address, "old", cluster.lock.key, lambda number, how: InternalError(how))
    cluster.trunks.append(trunk)
    with pytest.raises(ProtocolError, match=rf"(?s)versions \[0, 1\].*versions \[{VERSIONS[0]}, {VERSIONS[1]}\]"):
        trunk.start(Hello("client", "old", [0, 1]), WAIT_S)


@pytest.mark.parametrize("keys", ["another pair", "none"])
def test_a_stranger_is_not_let_in(cluster: Cluster, keys: str) -> None:
    public, secret = zmq.curve_keypair()
    if keys == "another pair":
        stranger = connect(zmq.Context(), cluster.relay.address, "test.0.0", Key(cluster.lock.key.hub_public, public, secret))
    else:
        stranger = zmq.Context().socket(zmq.DEALER)
        stranger.identity = b"test.0.0"
        stranger.connect(cluster.relay.address)
    hello = Hello("worker", "test.0.0", VERSIONS, [WorkerInfo("test.0.0", "here", 1, "127.0.0.1")])
    stranger.send_multipart(headed(Head(HELLO), hello))
    # One that is let in comes after it, so the stranger's word would be there by now.
    cluster.worker(1, Recorder())
    _, start = cluster.client()
    assert [worker.name for worker in start.workers] == ["test.1.0"]
    stranger.context.destroy(0)


def test_what_cannot_be_read_is_dropped_and_counted(cluster: Cluster) -> None:
    cluster.worker(0, Recorder())
    socket = connect(zmq.Context.instance(), cluster.relay.address, "odd", cluster.lock.key)
    for frames in ([b""], [b"\xc1"], [*headed(Head(HELLO)), b"x"], headed(Head(HELLO), 3), headed(Head("start", 1, [7]))):
        socket.send_multipart(frames)
    trunk, _ = cluster.client()
    trunk.request(0, [((0,), [Fetch(5, ONE, [])])])[0].result(WAIT_S)
    assert cluster.relay.dropped == 4
    socket.close(0)


class Talking(Recorder):
    """A runner that logs, in its own thread and from another, before it answers."""

    def __init__(self, line: list[Line], origin: Origin) -> None:
        super().__init__()
        self._line, self._origin = line, origin

    def run(self, first: int, batch: list[Any]) -> Any:
        other = threading.Thread(target=self.say, args=("from another thread",))
        other.start()
        other.join(WAIT_S)
        self.say("from its own")
        return super().run(first, batch)

    def say(self, text: str) -> None:
        assert self._line[0].log(Record(origin=self._origin, level=20, name="n", text=text))


def test_what_a_batch_logs_arrives_before_its_reply(cluster: Cluster) -> None:
    origin, lines, logged = Origin(title="worker", name="test.0.0", host="here", pid=1, worker=0), [], queue.SimpleQueue()
    runner = Talking(lines, origin)
    lines.append(cluster.worker(0, runner))
    trunk, start = cluster.client(level=20, logged=logged.put)
    assert start.log_level == 20
    trunk.request(0, [((0,), [Fetch(5, ONE, [])])])[0].result(WAIT_S)
    assert [logged.get_nowait().text for _ in range(2)] == ["from another thread", "from its own"]
    # Nothing else comes, and still it arrives.
    runner.say("when idle")
    assert logged.get(timeout=WAIT_S) == Record(origin=origin, level=20, name="n", text="when idle")
    # The controller's own.
    cluster.relay.call(lambda: logging.getLogger("dtorch.controller").warning("watch out"))
    record = logged.get(timeout=WAIT_S)
    assert (record.text, record.origin.title) == ("watch out", "controller")
    trunk.close()
    cluster.trunks.remove(trunk)
    await_end = cluster.relay.ask(lambda: None)
    await_end.result(WAIT_S)
    runner.say("after the end")
    cluster.client(logged=logged.put)
    logging.getLogger("dtorch.controller").warning("to nobody")
    assert logged.empty()
