"""The same program means the same on an embedded worker and on processes: results, order, futures and errors."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard
from dtorch.tensor import client as clients


@pytest.fixture(params=[None, 2], ids=["embedded", "processes"], scope="module")
def session(request: pytest.FixtureRequest) -> Iterator[None]:
    dtorch.shutdown()
    dtorch.init(workers=request.param)
    yield
    dtorch.shutdown()


def test_a_training_step(session: None) -> None:
    mesh = dtorch.init_device_mesh("cpu", (2, 3))
    x, w = torch.randn(7, 8), torch.randn(5, 8, requires_grad=True)
    placed = dtorch.Tensor(x, device_mesh=mesh, placements=[Shard(0), Replicate()])
    weight = dtorch.Tensor(w, device_mesh=mesh, placements=[Replicate(), Shard(1)], requires_grad=True)
    for tensor, parameter in ((x, w), (placed, weight)):
        torch.optim.SGD([parameter], lr=0.1)
        torch.relu(tensor @ parameter.t()).sum().backward()
    torch.testing.assert_close(weight.grad.to_torch(), w.grad)


def test_writes_are_seen_in_order(session: None) -> None:
    x = dtorch.zeros(6, device_mesh=dtorch.init_device_mesh("cpu", 4), placements=[Shard(0)])
    for i in range(100):
        x[i % 6] += i
    expected = torch.zeros(6)
    for i in range(100):
        expected[i % 6] += i
    assert torch.equal(x.to_torch(), expected)


def test_random_numbers_are_plain_ones(session: None) -> None:
    mesh = dtorch.init_device_mesh("cpu", 3)
    torch.manual_seed(3)
    expected = (torch.randn(5), torch.rand(2, 2))
    torch.manual_seed(3)
    got = (dtorch.randn(5, device_mesh=mesh, placements=[Shard(0)]), dtorch.rand(2, 2, device_mesh=mesh))
    assert all(torch.equal(g.to_torch(), e) for g, e in zip(got, expected, strict=True))


def test_an_error_names_the_line_and_leaves_the_session_usable(session: None) -> None:
    x = dtorch.arange(4, device_mesh=dtorch.init_device_mesh("cpu", 2), placements=[Shard(0)])
    bad = x // dtorch.zeros(4, dtype=torch.int64, device_mesh=x.device_mesh)
    with pytest.raises(dtorch.RemoteError) as caught:
        bad.to_torch()
    assert "test_session.py" in caught.value.site and "ZeroDivisionError" in str(caught.value)
    assert x.sum().item() == 6


def test_futures(session: None) -> None:
    x = dtorch.Tensor(torch.ones(3), device_mesh=dtorch.init_device_mesh("cpu", 2), placements=[Partial()])
    future = (x * 2).to_torch_async()
    assert future.wait(timeout=30) and future.is_ready()
    assert torch.equal(future.get(), torch.full((3,), 2.0))


def test_one_session_at_a_time() -> None:
    dtorch.session()
    with pytest.raises(dtorch.UsageError, match="while a session is running"):
        dtorch.init()


def at_once(*works: Callable[[], object]) -> None:
    """Run each in a thread, all at the same time."""
    together, errors = threading.Barrier(len(works)), []

    def run(work: Callable[[], object]) -> None:
        together.wait(30)
        try:
            work()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_threads_that_reset_at_once_begin_one_session() -> None:
    dtorch.shutdown()
    client = dtorch.init(workers=1)
    at_once(*[client.reset] * 3)
    assert dtorch.session() is not client and dtorch.session().status().epoch == 2
    assert dtorch.ones(3).sum().item() == 3
    dtorch.shutdown()


def test_a_thread_that_ends_a_session_while_another_begins_it_anew_ends_it() -> None:
    dtorch.shutdown()
    client = dtorch.init(workers=1)

    def reset() -> None:
        # The other may have been first.
        with contextlib.suppress(dtorch.SessionClosedError):
            client.reset()

    at_once(reset, dtorch.shutdown)
    assert clients.running() is None


@pytest.mark.parametrize("workers", [None, 1], ids=["embedded", "processes"])
def test_a_session_that_was_shut_down_does_not_begin_anew(workers: int | None) -> None:
    dtorch.shutdown()
    client = dtorch.init(workers=workers)
    dtorch.shutdown()
    with pytest.raises(dtorch.SessionClosedError, match=r"dtorch\.init"):
        client.reset()
    assert clients.running() is None


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent() -> None:
    dtorch.shutdown()
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with clients.beginning:
            held.set()
            over.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(60)
    child = os.fork()
    if child == 0:
        # The child's end shall be nothing to the tests.
        os._exit(3 if clients.beginning.acquire(timeout=5) else 4)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    over.set()
    holder.join()
    assert code == 3


def test_a_session_ends_at_exit_before_what_it_sends_with() -> None:
    program = """
import atexit
order, register = [], atexit.register
atexit.register = lambda ending, *given: order.append(str(ending.__module__)) or register(ending, *given)
import dtorch
assert order.index("zmq.utils.garbage") < order.index("dtorch.session"), order
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=120, check=False).returncode == 0
