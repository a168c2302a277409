"""Collectives under way: awaited at first use, in order, and no one's memory changes under them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Partial, Replicate, Shard, init_device_mesh
from dtorch.core.errors import RemoteError
from dtorch.core.program import Failure, Free
from dtorch.tensor.client import current_client
from dtorch.testing.threads import threaded_session
from dtorch.worker import underway
from dtorch.worker.store import Poison, Store, settled
from dtorch.worker.underway import Courier, Detached, Run

WORKERS = [(2, None), (3, {"cpu": [3, 2, 3]})]
POISON = Poison(Failure(0, "op", 0, "cpu:0", "none", "no", "no", False))


@pytest.fixture(params=WORKERS, ids=str)
def all_meanwhile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMesh]:
    """A mesh on several workers, whose collectives all run meanwhile, however small."""
    monkeypatch.setattr("dtorch.worker.compile.LATER_NBYTES", 0)
    count, counts = request.param
    with threaded_session(count, counts):
        yield init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"))


@pytest.fixture
def courier() -> Iterator[Courier]:
    made = Courier()
    yield made
    made.close()


def started(courier: Courier, store: Store, work: Any, handles: Sequence[int], sources: Sequence[Any] = ()) -> Run:
    run = Run(Detached(work, sources), handles, lambda error: POISON)
    courier.start(run, store)
    return run


def test_using_a_value_waits_for_it(courier: Courier) -> None:
    go, store, one = threading.Event(), Store(), torch.ones(3)
    started(courier, store, lambda: [(one,), (one + 1,)] if go.wait(30) else [], [5, 6])
    timer = threading.Timer(0.1, go.set)
    timer.start()
    assert store[6][0].sum() == 6 and settled(store[5]) == (one,)
    courier.settle(store)
    assert type(store[5]) is tuple and not courier.busy
    timer.join()


def test_a_failure_is_told_once_and_stands_for_every_output(courier: Courier) -> None:
    store = Store()
    started(courier, store, lambda: [()] * (1 // 0), [1, 2])
    with pytest.raises(TypeError):
        store[1][0]
    assert store.poison_of([7, 2]) is POISON
    courier.settle(store)
    assert store[1] is store[2] is POISON


def test_what_is_freed_is_not_kept(courier: Courier) -> None:
    store, made = Store(), torch.ones(2)
    run = started(courier, store, lambda: [(made,), (made,)], [1, 2])
    store.free([1])
    run.wait()
    assert run.places[0][1]() is None and store[2][0] is made
    courier.settle(store)
    assert 1 not in store


def test_memory_is_released_before_it_is_written(courier: Courier) -> None:
    go, store, read, other = threading.Event(), Store(), torch.ones(2), torch.ones(2)
    run = started(courier, store, lambda: [(read.clone(),)] if go.wait(30) else [], [1], [(read,)])
    courier.release([other])
    assert not run.over
    timer = threading.Timer(0.1, go.set)
    timer.start()
    courier.release([read[:1]])
    assert run.over
    timer.join()


def test_too_much_under_way_is_waited_for(courier: Courier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(underway, "MOST_NBYTES", 8)
    store, piece = Store(), torch.ones(1)
    runs = [started(courier, store, lambda: [(piece,)], [n], [(piece,)]) for n in range(5)]
    assert all(run.over for run in runs[:-2])


def test_sources_written_right_after(all_meanwhile: DeviceMesh) -> None:
    whole = torch.randn(301, 41, generator=torch.Generator().manual_seed(1))
    placed = (Replicate(), Shard(0), Shard(1), Partial())
    for source, target in itertools.product(placed, placed[:3]):
        x = dtorch.Tensor(whole, device_mesh=all_meanwhile).redistribute(placements=[Shard(0), source])
        y = x.redistribute(placements=[target, Shard(1)])
        # What lies there already stays what it is.
        if not isinstance(source, Partial) and x.placements != y.placements:
            x[3:].mul_(0)
        z = y.redistribute(placements=[Shard(1), target])
        torch.testing.assert_close(z.to_torch(), whole)
        if y.placements != z.placements:
            z = y.redistribute(placements=[Shard(1), target])
            y += 1
            torch.testing.assert_close(z.to_torch(), whole)
            torch.testing.assert_close(y.to_torch(), whole + 1)


def test_a_failure_meanwhile_spoils_only_what_depends_on_it(all_meanwhile: DeviceMesh) -> None:
    numbers = torch.arange(24.0).reshape(4, 6)
    placed = [Shard(0), Shard(1)]
    good = dtorch.Tensor(numbers, device_mesh=all_meanwhile).redistribute(placements=placed)
    mapped = dtorch.local_map(fails_on_large, [placed], placed)
    bad = mapped(good)
    chained = bad.redistribute(placements=[Shard(1), Replicate()]).redistribute(placements=[Replicate(), Shard(0)])
    fine = good.redistribute(placements=[Shard(1), Replicate()]).redistribute(placements=[Replicate(), Shard(0)])
    summed = chained.sum() + 1
    with pytest.raises(RemoteError, match="too large") as caught:
        summed.item()
    assert "test_underway.py" in str(caught.value)
    with pytest.raises(RemoteError, match="too large"):
        chained.to_torch()
    torch.testing.assert_close(fine.to_torch(), numbers)
    assert mapped(good - 20).redistribute(placements=[Replicate(), Replicate()]).sum().item() == (numbers - 20).sum()


def test_a_value_that_is_missing_on_one_worker_keeps_nobody_waiting(all_meanwhile: DeviceMesh) -> None:
    client = current_client()
    x = dtorch.Tensor(torch.ones(4, 6), device_mesh=all_meanwhile).redistribute(placements=[Shard(0), Shard(1)])
    assert x.sum().item() == 24
    # Only the first forgets it, as it should never be.
    client.sink._network.submit(client.first, [((0,), [Free([x._value.handle])])])
    with pytest.raises(RemoteError, match="not stored on this worker"):
        x.redistribute(placements=[Replicate(), Replicate()]).to_torch()


def fails_on_large(piece: torch.Tensor) -> torch.Tensor:
    """Fails where it finds a large number."""
    if not piece.is_meta and (piece > 20).any():
        raise ValueError("too large")
    return piece.clone()


def overwrite(piece: torch.Tensor) -> torch.Tensor:
    piece.fill_(-1)
    return piece.clone()


def test_a_function_that_writes_its_input_waits_for_who_reads_it(
    all_meanwhile: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    do = Run.do

    def late(run: Run) -> None:
        threading.Event().wait(0.05)
        do(run)

    monkeypatch.setattr(Run, "do", late)
    whole = torch.arange(35.0).view(7, 5)
    placed = [Shard(0), Shard(1)]
    for _ in range(3):
        x = dtorch.Tensor(whole, device_mesh=all_meanwhile, placements=placed)
        moved = x.redistribute(placements=[Replicate(), Replicate()])
        dtorch.local_map(overwrite, [placed], placed)(x).sum()
        assert torch.equal(moved.to_torch(), whole)
