"""One model that several threads run at a time, as a server does: right answers, and the same weights after."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import dtorch
from dtorch import DeviceMesh, init_device_mesh

THREADS, CALLS, TIMEOUT_S = 3, 4, 60.0
MESHES = [
    init_device_mesh("cpu", sizes, mesh_dim_names=names)
    for names, sizes in (
        (("fsdp",), (3,)),
        (("tp",), (2,)),
        (("pp",), (2,)),
        (("fsdp", "tp"), (2, 3)),
        (("pp", "fsdp"), (2, 2)),
    )
]
X = torch.randn(5, 12, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _by_turns() -> Iterator[None]:
    """Threads take turns so often that each finds the others half way."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def at_once(body: Callable[[], None]) -> None:
    """Run a function in several threads, and raise what the first of them raised."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            for _ in range(CALLS):
                body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not any(thread.is_alive() for thread in threads)
    for error in errors:
        raise error


def pair(mesh: DeviceMesh, zero: int) -> tuple[nn.Module, nn.Module]:
    """A plain model and its distributed copy."""
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 12)) for _ in range(4)])
    return plain, dtorch.parallelize(copy.deepcopy(plain), mesh, zero=zero)


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_inference(mesh: DeviceMesh, zero: int) -> None:
    plain, ours = pair(mesh, zero)
    before, wanted = [id(p) for p in ours.parameters()], plain(X)

    def body() -> None:
        with torch.no_grad():
            torch.testing.assert_close(ours(X).to_torch(), wanted)

    at_once(body)
    assert [id(p) for p in ours.parameters()] == before


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_training_with_one_backward_pass_at_a_time(mesh: DeviceMesh, zero: int) -> None:
    plain, ours = pair(mesh, zero)
    before, lock = [id(p) for p in ours.parameters()], threading.Lock()

    def body() -> None:
        loss = ours(X).square().mean()
        # PyTorch itself promises nothing of threads that add to one gradient.
        with lock:
            loss.backward()

    at_once(body)
    assert [id(p) for p in ours.parameters()] == before
    (plain(X).square().mean() * THREADS * CALLS).backward()
    for found, wanted in zip(ours.parameters(), plain.parameters(), strict=True):
        assert isinstance(found.grad, dtorch.Tensor)
        torch.testing.assert_close(found.grad.to_torch(), wanted.grad)
