"""Batches over sockets: in order, with credits, and only for those who have the key."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import zmq

from dtorch.core.errors import InternalError
from dtorch.core.program import Barrier, Fetch, Free
from dtorch.transport.sockets import CREDITS, Hub, Key, Line
from tests.transport.runners import Gated, Recorder
from tests.worker.plans import ONE

WAIT_S = 20.0


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub(2)
    yield made
    made.close()


def serve(hub: Hub, number: int, runner: Recorder) -> threading.Thread:
    """A worker in a thread, ready."""
    line = Line(hub.address, number, hub.key)
    thread = threading.Thread(target=line.serve, args=(runner,))
    thread.start()
    assert hub.links[number].await_start(WAIT_S)
    return thread


def test_each_worker_gets_its_batches_in_order(hub: Hub) -> None:
    recorders = [Recorder(), Recorder()]
    threads = [serve(hub, number, recorder) for number, recorder in enumerate(recorders)]
    for n in range(3 * CREDITS):
        hub.links[n % 2].submit(n, [Free([n])])
    replies = [link.request(7, [Barrier(), Fetch(5, ONE, [])]) for link in hub.links]
    assert [reply.result(WAIT_S).result for reply in replies] == [[5, 3 * CREDITS // 2 + 1]] * 2
    for link, thread in zip(hub.links, threads, strict=True):
        link.close()
        thread.join(WAIT_S)
    for number, recorder in enumerate(recorders):
        sent = [(n, [Free([n])]) for n in range(number, 3 * CREDITS, 2)]
        assert recorder.batches == [*sent, (7, [Barrier(), Fetch(5, ONE, [])])] and recorder.closed == 1


def test_who_waits_for_a_lost_worker_is_told(hub: Hub) -> None:
    link, gated = hub.links[0], Gated()
    worker = serve(hub, 0, gated)
    reply = link.request(0, [Barrier(), Fetch(5, ONE, [])])
    for n in range(CREDITS - 1):
        link.submit(n, [])
    told: list[BaseException] = []

    def wait_for_credit() -> None:
        try:
            link.submit(0, [])
        except InternalError as error:
            told.append(error)

    thread = threading.Thread(target=wait_for_credit)
    thread.start()
    lost = InternalError("gone")
    link.lose(lost)
    thread.join(WAIT_S)
    assert told == [lost]
    with pytest.raises(InternalError, match="gone"):
        reply.result(WAIT_S)
    with pytest.raises(InternalError, match="gone"):
        link.submit(0, [])
    gated.gate.set()
    link.close()
    worker.join(WAIT_S)


def test_a_worker_that_is_not_there_is_lost(hub: Hub) -> None:
    reply = hub.links[1].request(0, [Barrier()])
    with pytest.raises(InternalError, match="worker 1"):
        reply.result(WAIT_S)


@pytest.mark.parametrize("keys", ["another pair", "none"])
def test_a_stranger_is_not_let_in(hub: Hub, keys: str) -> None:
    public, secret = zmq.curve_keypair()
    if keys == "another pair":
        stranger = Line(hub.address, 0, Key(hub.key.hub_public, public, secret))._socket
    else:
        stranger = zmq.Context.instance().socket(zmq.DEALER)
        stranger.identity = b"0"
        stranger.connect(hub.address)
    stranger.send(b"h")
    runner = Recorder()
    # One that is let in comes after it, on the other link, so the stranger's word would be there by now.
    thread = serve(hub, 1, runner)
    assert not hub.links[0].await_start(0)
    hub.links[1].close()
    thread.join(WAIT_S)
    stranger.context.destroy(0)


def test_what_is_watched_is_told_once(hub: Hub) -> None:
    reading, writing = os.pipe()
    told = threading.Event()
    hub.watch(reading, told.set)
    assert not told.is_set()
    os.close(writing)
    assert told.wait(WAIT_S)
