"""What a program asks of worker processes between its operators: values, functions of its own, errors."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Partial, RemoteError, Replicate, Shard, init_device_mesh
from dtorch.transport.trunk import CREDIT_NBYTES
from tests.sharding.harness import place, values

MESH = init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"))
EVERYWHERE = [Shard(0), Shard(1)]


def test_futures() -> None:
    x = place(values(6, 9), MESH, tuple(EVERYWHERE))

    async def program() -> list[torch.Tensor]:
        futures = [(x * n).to_torch_async() for n in range(8)]
        return [await f for f in reversed(futures)]

    assert all(torch.equal(t, values(6, 9) * n) for t, n in zip(asyncio.run(program()), reversed(range(8)), strict=True))
    future = x.to_torch_async()
    x.zero_()
    assert future.wait(60) and torch.equal(future.get(), values(6, 9)) and not x.any()


def test_printing_shards_and_lists() -> None:
    x = place(values(4, 6), MESH, tuple(EVERYWHERE))
    assert "Shard(0), Shard(1)" in repr(x) and x.tolist() == values(4, 6).tolist()
    assert torch.equal(
        torch.cat([s.to_torch() if isinstance(s, dtorch.Tensor) else s for s in x.shards[:3]], 1), values(4, 6)[:2]
    )


def test_functions_with_gradients() -> None:
    scale = torch.tensor([2.0, 3.0, 4.0, 5.0])

    def scaled(t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (t * scale[: t.shape[1]]).sin() @ w

    x, w = values(4, 6).requires_grad_(), values(6, 2, seed=1).requires_grad_()
    ours = [place(t.detach(), MESH, p).requires_grad_() for t, p in ((x, tuple(EVERYWHERE)), (w, (Replicate(), Shard(0))))]
    mapped = dtorch.local_map(scaled, [EVERYWHERE, [Replicate(), Shard(0)]], [Shard(0), Partial()])(*ours)
    expected = sum(scaled(a, b) for a, b in zip(x.split(2, 1), w.split(2, 0), strict=True))
    torch.testing.assert_close(mapped.to_torch(), expected)
    for a, b in zip(
        torch.autograd.grad((mapped * 2).sum(), ours), torch.autograd.grad((expected * 2).sum(), [x, w]), strict=True
    ):
        torch.testing.assert_close(a.to_torch(), b)


def test_what_another_mesh_has() -> None:
    x = torch.arange(35.0).reshape(7, 5)
    meshes = [DeviceMesh("cpu", ids) for ids in ([0], [7, 3], [2, 0, 5], [1, 2])]
    for source in meshes:
        for target in meshes:
            moved = dtorch.Tensor(x, device_mesh=source, placements=[Shard(1)]).redistribute(target, [Shard(0)]) + 1
            assert torch.equal(moved.to_torch(), x + 1)


def test_more_at_once_than_may_be_under_way() -> None:
    whole = torch.ones(CREDIT_NBYTES // 4 // 5)
    for mesh in (DeviceMesh("cpu", [0]), DeviceMesh("cpu", [7])):
        given = [dtorch.Tensor(whole, device_mesh=mesh) for _ in range(6)]
        assert [t[-1].item() for t in given] == [1.0] * 6


def test_threads() -> None:
    found: list[float] = []

    def work(n: int) -> None:
        x = dtorch.full((6, 6), float(n), device_mesh=MESH, placements=EVERYWHERE)
        for _ in range(20):
            x = (x + 1).redistribute(placements=[Shard(1), Shard(0)]).redistribute(placements=EVERYWHERE)
        found.append(x.sum().item())

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [36.0 * (n + 20) for n in range(4)]


def choosy(piece: torch.Tensor) -> torch.Tensor:
    """Fails where it finds a negative number."""
    if not piece.is_meta and (piece < 0).any():
        raise ValueError("a negative number")
    return piece.clone()


def test_failures_name_what_failed_first() -> None:
    numbers = torch.ones(4, 6)
    numbers[3, 5] = -1
    made = dtorch.local_map(choosy, [EVERYWHERE], EVERYWHERE)(place(numbers, MESH, tuple(EVERYWHERE)))
    there = [
        made.sum(),
        made.redistribute(placements=[Shard(1), Shard(0)]) + 1,
        made.redistribute(placements=[Replicate(), Replicate()]).redistribute(DeviceMesh("cpu", [0]), [Replicate()]) * 2,
    ]
    for result in [*there, *there]:
        with pytest.raises(RemoteError, match="a negative number") as caught:
            result.to_torch()
        assert caught.value.operator == "choosy" and "test_client.py" in caught.value.site
    assert dtorch.ones(5, device_mesh=MESH, placements=[Shard(0), Replicate()]).sum().item() == 5


def test_refusals_leave_the_session_as_it_is() -> None:
    x = place(values(4, 6), MESH, tuple(EVERYWHERE))
    with pytest.raises(RuntimeError):
        x @ x
    with pytest.raises(RemoteError, match="index"):
        x[torch.tensor([1, 9])].to_torch()
    assert torch.equal(x.to_torch(), values(4, 6))


def test_memory_is_given_back() -> None:
    x = place(values(64, 64), MESH, tuple(EVERYWHERE))
    for _ in range(300):
        y = (x @ x.t()).relu_()
    del y
    gc.collect()
    assert x.sum().item() == values(64, 64).sum().item()
