"""Values on their way: waiting, timing out, asyncio, and errors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import torch

import dtorch
from dtorch import RemoteError, Shard, TensorFuture, init_device_mesh
from dtorch.testing.sessions import own_session
from dtorch.testing.thread import ThreadTransport
from dtorch.worker.executor import Executor

MESH = init_device_mesh("cpu", 2)


class HeldExecutor(Executor):
    """A worker that does nothing until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def submit(self, first: int, batch: list) -> None:
        self.released.wait(60)
        super().submit(first, batch)

    def run(self, first: int, batch: list) -> object:
        self.released.wait(60)
        return super().run(first, batch)


@pytest.fixture
def held() -> Iterator[HeldExecutor]:
    """A session whose worker has a thread of its own and waits to be released."""
    worker = HeldExecutor()
    with own_session(worker, ThreadTransport):
        try:
            yield worker
        finally:
            worker.released.set()


def test_get() -> None:
    x = dtorch.Tensor(torch.arange(4.0), device_mesh=MESH, placements=[Shard(0)])
    future = (x * 2).to_torch_async()
    assert isinstance(future, TensorFuture)
    assert future.wait(5) and future.is_ready()
    assert future.get().tolist() == [0.0, 2.0, 4.0, 6.0]
    assert future.get(timeout=0) is future.get()


def test_the_value_is_that_of_the_time_of_asking() -> None:
    x = dtorch.ones(4, device_mesh=MESH, placements=[Shard(0)])
    future = x.to_torch_async()
    x.zero_()
    assert future.get().tolist() == [1.0] * 4


def test_waiting_ends_in_time(held: HeldExecutor) -> None:
    future = (dtorch.ones(4, device_mesh=MESH) * 2).to_torch_async()
    assert not future.is_ready()
    assert future.wait(timeout=0.01) is False
    with pytest.raises(TimeoutError):
        future.get(timeout=0.01)
    held.released.set()
    assert future.get(timeout=30).tolist() == [2.0] * 4
    assert future.is_ready() and future.wait()


def test_awaiting_does_not_block_the_loop(held: HeldExecutor) -> None:
    async def program() -> list[object]:
        future = (dtorch.ones(2, device_mesh=MESH) * 3).to_torch_async()
        order: list[object] = []

        async def reader() -> None:
            order.append((await future).tolist())

        task = asyncio.ensure_future(reader())
        for step in range(3):
            await asyncio.sleep(0)
            order.append(step)
        held.released.set()
        await asyncio.wait_for(task, 30)
        return order

    assert asyncio.run(program()) == [0, 1, 2, [3.0, 3.0]]


def test_many_futures_together_and_twice() -> None:
    async def program() -> list[torch.Tensor]:
        futures = [(dtorch.full((2,), float(i), device_mesh=MESH)).to_torch_async() for i in range(5)]
        await asyncio.gather(*futures)
        return [await f for f in futures]

    assert [t.tolist() for t in asyncio.run(program())] == [[float(i)] * 2 for i in range(5)]


def test_giving_up_on_an_await_leaves_the_future_usable(held: HeldExecutor) -> None:
    async def program() -> torch.Tensor:
        future = dtorch.ones(2, device_mesh=MESH).to_torch_async()

        async def read() -> torch.Tensor:
            return await future

        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(read(), 0.01)
        held.released.set()
        return await future

    assert asyncio.run(program()).tolist() == [1.0, 1.0]


def failing() -> TensorFuture:
    weight = dtorch.ones(3, 2, device_mesh=MESH)
    return torch.nn.functional.embedding(dtorch.Tensor([7], device_mesh=MESH), weight).to_torch_async()


def test_errors_are_raised_by_get_and_by_await() -> None:
    with pytest.raises(RemoteError, match="embedding"):
        failing().get()

    async def program() -> None:
        await failing()

    with pytest.raises(RemoteError, match="embedding"):
        asyncio.run(program())
    assert dtorch.ones(2, device_mesh=MESH).tolist() == [1.0, 1.0]


def test_an_error_is_raised_each_time_it_is_asked_for() -> None:
    future = failing()
    for _ in range(2):
        with pytest.raises(RemoteError):
            future.get()
    assert future.wait() and future.is_ready()


def test_the_client_runs_ahead_of_a_busy_worker(held: HeldExecutor) -> None:
    x = dtorch.ones(2, device_mesh=MESH)
    for _ in range(500):
        x = x + 1
    future = x.to_torch_async()
    assert not future.is_ready()
    held.released.set()
    assert future.get(60).tolist() == [501.0, 501.0]
