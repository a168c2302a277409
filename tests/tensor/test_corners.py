"""Corners where operators, threads and meshes meet."""

from __future__ import annotations

import threading

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule:RuntimeWarning")

MESH = dtorch.init_device_mesh("cpu", 2, mesh_dim_names=("a",))
X = torch.arange(1, 13.0).view(4, 3)
ROWS = Shard(0)


def place(t: torch.Tensor, placement: dtorch.Placement = ROWS) -> dtorch.Tensor:
    return dtorch.Tensor(t, device_mesh=MESH, placements=[placement])


@pytest.mark.parametrize("placement", [Shard(0), Partial(), Replicate()], ids=str)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.AdamW])
def test_a_fused_optimizer_writes_what_it_has_no_meta_kernel_for(optimizer: type, placement: dtorch.Placement) -> None:
    trained = []
    for start in (torch.arange(1.0, 8), place(torch.arange(1.0, 8), placement)):
        w = torch.nn.Parameter(start)
        steps = optimizer([w], lr=0.1, fused=True, **({"momentum": 0.9} if optimizer is torch.optim.SGD else {}))
        for _ in range(3):
            (w * w).sum().backward()
            steps.step()
            steps.zero_grad()
        trained.append(w.detach())
    torch.testing.assert_close(trained[1].to_torch(), trained[0])
    assert trained[1].placements == (placement,)


def test_threads_share_one_stream() -> None:
    failures: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for _ in range(40):
                a = place(X + i).requires_grad_()
                (a * a).sum().backward()
                assert torch.equal(a.grad.to_torch(), 2 * (X + i))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []


def test_gradients_of_a_sum_over_two_meshes() -> None:
    other = dtorch.init_device_mesh("cpu", 3, mesh_dim_names=("b",))
    a = place(torch.ones(4)).requires_grad_()
    b = dtorch.Tensor(torch.ones(5), device_mesh=other, placements=[Shard(0)], requires_grad=True)
    ((a * a).sum() + (b * b).sum() * 2).backward()
    assert torch.equal(a.grad.to_torch(), torch.full((4,), 2.0))
    assert torch.equal(b.grad.to_torch(), torch.full((5,), 4.0)) and b.grad.device_mesh is other


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
def test_a_view_is_written_in_inference_mode(placement: dtorch.Placement) -> None:
    with torch.inference_mode():
        a, plain = place(X.clone(), placement), X.clone()
        for t in (a, plain):
            t.view(-1)[2:7].add_(1)
    assert torch.equal(a.to_torch(), plain)


def test_outputs_that_return_nothing() -> None:
    a, b, plain = place(X.clone()), place(X * 2), X.clone()
    torch.split_copy(b, 2, 0, out=[a.narrow(0, 0, 2), a.narrow(0, 2, 2)])
    torch.split_copy(X * 2, 2, 0, out=[plain.narrow(0, 0, 2), plain.narrow(0, 2, 2)])
    assert torch.equal(a.to_torch(), plain)


def test_an_operator_that_writes_two_and_returns_one() -> None:
    scales = []
    for make in (torch.clone, lambda t: dtorch.Tensor(t, device_mesh=MESH)):
        scale, growth = make(torch.tensor(4.0)), make(torch.zeros((), dtype=torch.int32))
        scales.append(torch._amp_update_scale_(scale, growth, make(torch.ones(())), 2.0, 0.5, 1))
    assert scales[1].item() == scales[0].item()


def test_a_write_to_overlapping_windows_of_a_copy_is_refused() -> None:
    t = dtorch.Tensor(torch.zeros(6), device_mesh=MESH, placements=[Shard(0)])
    with pytest.raises(dtorch.UsageError, match="cannot be carried back"):
        t.unfold(0, 2, 1)[:, 0] = 7


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
def test_parts_of_a_conjugate(placement: dtorch.Placement) -> None:
    z = torch.randn(4, 3, dtype=torch.complex64)
    for read in (lambda t: t.conj().imag, lambda t: t.conj().real, lambda t: torch.view_as_real(t.conj().resolve_conj())):
        assert torch.equal(read(place(z, placement)).to_torch(), read(z))
