"""Values live on the workers exactly as long as some tensor needs them, and die in stream order."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard, init_device_mesh
from dtorch.tensor.client import Client
from dtorch.testing.sessions import own_session
from dtorch.testing.thread import ThreadTransport
from dtorch.worker.executor import Executor
from tests.sharding.harness import place, values

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule:RuntimeWarning")
R = Replicate()
MESH = init_device_mesh("cpu", (2, 2))


@pytest.fixture
def session() -> Iterator[tuple[Client, Executor]]:
    gc.collect()
    gc.freeze()  # what there is already need not be searched again and again
    try:
        with own_session() as pair:
            yield pair
    finally:
        gc.unfreeze()


def live(session: tuple[Client, Executor]) -> int:
    """Number of values that the worker holds once everything issued has run."""
    client, worker = session
    gc.collect()
    client.flush()
    client.flush()
    return len(worker.store)


def nbytes(session: tuple[Client, Executor]) -> int:
    """Bytes of the distinct memories that the worker holds."""
    live(session)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for v in session[1].store.values() for t in v}
    return sum(storages.values())


def test_a_dropped_tensor_is_freed(session: tuple) -> None:
    x = place(values(6, 4), MESH, (Shard(0), R))
    assert live(session) == 1
    y = x + 1
    assert live(session) == 2
    del x
    assert live(session) == 1
    del y
    assert live(session) == 0


def test_temporaries_of_an_expression_are_freed(session: tuple) -> None:
    x = place(values(6, 4), MESH, (Shard(0), R))
    for _ in range(50):
        x = ((x * 2 + 1).t() @ x).relu()[:4].redistribute(placements=[R, Shard(1)]).redistribute(placements=[Shard(0), R])
        x = x / x.abs().max()
    assert live(session) == 1


def test_freeing_waits_for_what_was_issued_before(session: tuple) -> None:
    results = []
    for i in range(300):
        x = dtorch.full((8,), float(i), device_mesh=MESH, placements=[Shard(0), R])
        results.append(x.sum())
        del x
    assert [int(r) for r in results] == [8 * i for i in range(300)]
    assert live(session) == 300


def test_views_hold_one_memory(session: tuple) -> None:
    x = dtorch.ones(64, 64, device_mesh=MESH, placements=[R, R])
    views = [x.t(), x[3], x.view(-1), x.detach(), x.data, x.unbind(0)]
    assert nbytes(session) == 64 * 64 * 4
    del x
    assert nbytes(session) == 64 * 64 * 4
    del views
    assert nbytes(session) == live(session) == 0


def test_linked_views_end_with_their_users(session: tuple) -> None:
    x = place(values(6, 4), MESH, (Shard(0), R))
    v = x.view(-1)[::5]
    v.mul_(2)
    x.add_(1)
    assert v.sum().item() == x.view(-1)[::5].sum().item()
    del x, v
    assert live(session) == 0


def test_what_is_replicated_is_kept_once(session: tuple) -> None:
    big = init_device_mesh("cpu", (8, 64))
    x = dtorch.ones(1024, device_mesh=big)
    assert nbytes(session) == 4096
    y = dtorch.ones(1024, device_mesh=big, placements=[R, Shard(0)])
    assert nbytes(session) == 2 * 4096
    z = x + y + 1
    del x, y
    assert nbytes(session) == 4096 and z.sum().item() == 3 * 1024


def test_autograd_frees_the_graph(session: tuple) -> None:
    w = place(values(4, 4), MESH, (Shard(0), R)).requires_grad_()
    for _ in range(3):
        loss = (w @ w).tanh().pow(2).sum()
        loss.backward()
        del loss
        assert live(session) == 2
        w.grad = None
        assert live(session) == 1


def test_a_training_loop_is_flat(session: tuple) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
    for module in model:
        for name, p in list(module.named_parameters()):
            setattr(module, name, torch.nn.Parameter(dtorch.Tensor(p.data, device_mesh=MESH, placements=[R, Shard(0)])))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sizes = []
    for _ in range(6):
        optimizer.zero_grad()
        model(dtorch.randn(6, 4, device_mesh=MESH, placements=[Shard(0), R])).pow(2).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        sizes.append((live(session), nbytes(session)))
    assert sizes[2:] == [sizes[2]] * 4


def test_plain_tensors_mixed_in_are_freed(session: tuple) -> None:
    x = place(values(6), init_device_mesh("cpu", 2), (Shard(0),))
    for _ in range(20):
        x = x + torch.ones(6)
    assert live(session) == 1


def test_reading_holds_nothing(session: tuple) -> None:
    x = place(values(6, 4), MESH, (Shard(0), Partial()))
    future = x.to_torch_async()
    x.to_torch(), x.shards, x.tolist(), repr(x), x.sum().item(), x.numpy(), future.get()
    del future
    assert live(session) == 1


def test_failed_operators_leave_nothing_behind(session: tuple) -> None:
    for _ in range(3):
        bad = torch.nn.functional.embedding(dtorch.Tensor([9], device_mesh=MESH), dtorch.ones(3, 2, device_mesh=MESH))
        worse = bad * 2 + 1
        with pytest.raises(dtorch.RemoteError):
            worse.to_torch()
        del bad, worse
    assert live(session) == 0


def test_deep_copies_and_parameters(session: tuple) -> None:
    p = torch.nn.Parameter(place(values(6, 4), MESH, (Shard(0), R)))
    assert live(session) == 1
    p.data = dtorch.ones(2, device_mesh=MESH)
    assert live(session) == 1
    del p
    assert live(session) == 0


def test_tensors_may_die_on_another_thread_and_after_the_session() -> None:
    import threading

    with own_session() as session:
        box = [place(values(6), init_device_mesh("cpu", 2), (Shard(0),)) for _ in range(4)]
        thread = threading.Thread(target=box.clear)
        thread.start()
        thread.join()
        assert live(session) == 0
        survivor = dtorch.ones(2)
    del survivor
    gc.collect()


def test_a_worker_on_a_thread_of_its_own_frees_too() -> None:
    with own_session(transport=ThreadTransport) as (client, worker):
        x = place(values(6), init_device_mesh("cpu", 2), (Shard(0),))
        for _ in range(200):
            x = x * 1 + 1
        x.to_torch()
        gc.collect()
        client.flush()
        client.flush()
        dtorch.ones(1).to_torch()
        assert len(worker.store) <= 3
