"""One suite for every transport, then what only the thread can do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from dtorch.core.errors import InternalError
from dtorch.core.program import Barrier, Call, Calls, Fetch, Free, PendingReply
from dtorch.testing.thread import ThreadTransport
from dtorch.transport.base import Runner, Transport
from dtorch.transport.inprocess import InlineTransport
from dtorch.transport.messages import EncodedTransport
from tests.transport.runners import Broken, Gated, Recorder
from tests.worker.plans import ONE

Make = Callable[[Runner], Transport]

MAKERS: dict[str, Make] = {
    "inline": InlineTransport,
    "thread": ThreadTransport,
    "encoded inline": lambda runner: EncodedTransport(InlineTransport(runner)),
    "encoded thread": lambda runner: EncodedTransport(ThreadTransport(runner)),
}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    made: list[Transport] = []

    def one(runner: Runner) -> Transport:
        made.append(MAKERS[request.param](runner))
        return made[-1]

    yield one
    for transport in made:
        transport.close()


def test_batches_arrive_in_order_and_whole(make: Make) -> None:
    recorder = Recorder()
    transport = make(recorder)
    sent = [(n, [Calls.of(Call(n, [1, 2], [3], [0.5])), Free([n])]) for n in range(100)]
    for first, batch in sent:
        transport.submit(first, batch)
    reply = transport.request(100, [Barrier(), Fetch(7, ONE, [])]).result(10)
    assert reply.result == [7, 101]
    assert recorder.batches == [*sent, (100, [Barrier(), Fetch(7, ONE, [])])]


def test_replies_belong_to_their_requests(make: Make) -> None:
    transport = make(Recorder())
    pending = [transport.request(0, [Fetch(n, ONE, [])]) for n in range(10)]
    assert [p.result(10).result for p in pending] == [[n, n + 1] for n in range(10)]
    assert all(p.done() for p in pending)


def test_callbacks_are_called_with_the_reply_before_and_after_it_is_there(make: Make) -> None:
    transport = make(Recorder())
    called: Future[PendingReply] = Future()
    reply = transport.request(0, [Fetch(1, ONE, [])])
    reply.add_done_callback(called.set_result)
    assert called.result(10) is reply
    late: list[PendingReply] = []
    reply.add_done_callback(late.append)
    assert late == [reply] and late[0].result(0).result == [1, 1]


def test_closing_finishes_what_was_sent_and_closes_the_runner(make: Make) -> None:
    recorder = Recorder()
    transport = make(recorder)
    for n in range(20):
        transport.submit(n, [Free([n])])
    transport.close()
    assert len(recorder.batches) == 20 and recorder.closed == 1


def test_a_runner_that_breaks_is_heard_of_at_once_or_at_the_next_use(make: Make) -> None:
    transport = make(Broken())
    with pytest.raises((OSError, InternalError), match="on fire"):
        transport.submit(0, [Free([1])])
        transport.request(0, [Fetch(1, ONE, [])]).result(10)
        transport.submit(0, [Free([1])])
    with pytest.raises((OSError, InternalError)):
        transport.request(0, [Fetch(1, ONE, [])]).result(10)


def test_inline_runs_in_the_calling_thread_and_a_thread_elsewhere() -> None:
    for kind, same in (("inline", True), ("thread", False)):
        recorder = Recorder()
        transport = MAKERS[kind](recorder)
        transport.request(0, [Fetch(1, ONE, [])]).result(10)
        transport.close()
        assert (recorder.threads == {threading.get_ident()}) is same


def test_the_thread_lets_the_client_run_ahead_until_credits_end() -> None:
    gated = Gated()
    transport = ThreadTransport(gated, credits=3)
    ahead = threading.Semaphore(0)

    def client() -> None:
        for n in range(8):
            transport.submit(n, [Free([n])])
            ahead.release()

    sender = threading.Thread(target=client)
    sender.start()
    # one batch in the worker's hands and three that wait
    for _ in range(4):
        assert ahead.acquire(timeout=10)
    assert not ahead.acquire(timeout=0.05), "the client ran ahead of its credits"
    gated.gate.set()
    sender.join(10)
    transport.close()
    assert len(gated.batches) == 8


def test_a_reply_that_is_not_there_times_out() -> None:
    gated = Gated()
    transport = ThreadTransport(gated)
    reply = transport.request(0, [Fetch(1, ONE, [])])
    assert not reply.done()
    with pytest.raises(TimeoutError):
        reply.result(0.01)
    gated.gate.set()
    assert reply.result(10).result == [1, 1]
    transport.close()


def test_requests_behind_a_break_fail_and_do_not_run() -> None:
    class BrokenLater(Gated):
        def submit(self, first, batch):
            super().submit(first, batch)
            raise OSError("the machine is on fire")

    broken = BrokenLater()
    transport = ThreadTransport(broken)
    transport.submit(0, [Free([1])])
    behind = transport.request(0, [Fetch(1, ONE, [])])
    broken.gate.set()
    with pytest.raises(InternalError, match="earlier batch"):
        behind.result(10)
    with pytest.raises(InternalError, match="on fire"):
        transport.submit(0, [Free([1])])
    transport.close()
    assert len(broken.batches) == 1 and broken.closed == 1


def test_closing_gives_up_on_a_worker_that_hangs() -> None:
    gated = Gated()
    transport = ThreadTransport(gated, close_timeout_s=0.02)
    transport.submit(0, [Free([1])])
    with pytest.raises(InternalError, match="did not end"):
        transport.close()
    gated.gate.set()
    transport._thread.join(10)
