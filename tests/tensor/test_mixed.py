"""Plain tensors mixed in: taken as replicated when read, written when written, in both directions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import DeviceMesh, MeshError, Partial, Replicate, Shard, init_device_mesh
from tests.sharding.harness import check, place, values

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule:RuntimeWarning")
R = Replicate()
MESH = init_device_mesh("cpu", (2, 2))

READS = {
    "plain second": lambda x: x + torch.arange(4.0),
    "plain first": lambda x: torch.arange(4.0) * x,
    "plain scalar tensor": lambda x: x * torch.tensor(3.0) + torch.tensor(2),
    "plain matrix product": lambda x: torch.ones(3, 5) @ x,
    "plain mask": lambda x: torch.where(torch.tensor([True, False, True, False]), x, -x),
    "plain index": lambda x: x[torch.tensor([4, 0])],
    "plain boolean mask": lambda x: x[torch.tensor([True, False, False, True, True])],
    "plain index of two dims": lambda x: x[torch.tensor([4, 0]), torch.tensor([1, 3])],
    "plain weights": lambda x: F.linear(x, torch.ones(2, 4), torch.ones(2)),
    "plain in a list": lambda x: torch.cat([torch.zeros(1, 4), x, torch.ones(2, 4)]),
    "plain stack": lambda x: torch.stack([x, torch.ones(5, 4)]),
    "plain comparison": lambda x: (x > torch.zeros(4)).float(),
    "plain ids, global table": lambda x: F.embedding(torch.tensor([[4, 0]]), x),
    "plain targets": lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2, 3, 0])),
    "plain layer norm": lambda x: F.layer_norm(x, (4,), torch.ones(4), torch.zeros(4)),
    "plain gather": lambda x: x.gather(1, torch.tensor([[0], [1], [2], [3], [0]])),
    "plain empty": lambda x: torch.cat([torch.empty(0, 4), x]),
    "plain bool and": lambda x: (x > 0) & torch.tensor([True, True, False, False]),
    "plain clamp bounds": lambda x: torch.clamp(x, torch.tensor(-0.5), torch.tensor(0.5)),
    "numpy scalar": lambda x: x * torch.arange(4.0).numpy()[2],
}

WRITES = {
    "copy_": lambda x: x.clone().copy_(torch.arange(20.0).view(5, 4)),
    "copy_ broadcast": lambda x: x.clone().copy_(torch.arange(4.0)),
    "add_": lambda x: x.clone().add_(torch.ones(4), alpha=2),
    "setitem": lambda x: _set(x.clone(), (slice(1, 3),), torch.arange(4.0)),
    "setitem by plain index": lambda x: _set(x.clone(), (torch.tensor([0, 4]),), torch.ones(2, 4)),
    "setitem by plain mask": lambda x: _set(x.clone(), (torch.tensor([True, False, True, False, True]),), torch.tensor(7.0)),
    "index_put accumulate": lambda x: x.clone().index_put_((torch.tensor([0, 0]),), torch.ones(2, 4), accumulate=True),
    "masked_fill_": lambda x: x.clone().masked_fill_(torch.ones(5, 4).tril().bool(), torch.tensor(3.0)),
    "scatter_": lambda x: x.clone().scatter_(1, torch.tensor([[0], [1], [2], [3], [0]]), torch.full((5, 1), 9.0)),
    "index_copy_": lambda x: x.clone().index_copy_(0, torch.tensor([3, 1]), torch.ones(2, 4)),
    "out=": lambda x: torch.add(x, torch.ones(4), out=torch.empty_like(x)),
}


def _set(z: torch.Tensor, index: tuple, value: object) -> torch.Tensor:
    z[index if len(index) > 1 else index[0]] = value
    return z


@pytest.mark.parametrize("fn", READS.values(), ids=READS)
def test_reads(fn: object) -> None:
    check(fn, values(5, 4), rule=False, limit=25)


@pytest.mark.parametrize("fn", WRITES.values(), ids=WRITES)
def test_writes_to_global_tensors(fn: object) -> None:
    check(fn, values(5, 4), rule=False, limit=25)


@pytest.mark.parametrize("placements", [(R, R), (Shard(0), Shard(1)), (Partial(), R)], ids=str)
def test_writes_of_global_values_into_plain_tensors(placements: tuple) -> None:
    expected, x = values(5, 4), place(values(5, 4), MESH, placements)
    target = torch.zeros(5, 4)
    assert target.copy_(x) is target and torch.equal(target, expected) and type(target) is torch.Tensor
    target = torch.zeros(5, 4)
    target += x
    assert torch.equal(target, expected) and type(target) is torch.Tensor
    target[1:3] = x[0]
    assert torch.equal(target[1:3], expected[0].expand(2, 4))
    target[torch.tensor([4])] = x[:1]
    assert torch.equal(target[4], expected[0])
    target.t()[0].mul_(x[0, 0])
    assert torch.equal(target[0, 0], expected[0, 0] ** 2)
    out = torch.empty(5, 4)
    assert torch.add(x, 1, out=out) is out and torch.equal(out, expected + 1)
    values_out, indices_out = torch.empty(5), torch.empty(5, dtype=torch.int64)
    torch.max(x, 1, out=(values_out, indices_out))
    assert torch.equal(values_out, expected.max(1).values) and torch.equal(indices_out, expected.max(1).indices)


def test_index_of_a_plain_tensor_by_a_global_one() -> None:
    index = dtorch.Tensor([2, 0], device_mesh=MESH, placements=[Shard(0), R])
    table = torch.arange(12.0).view(4, 3)
    assert table[index].tolist() == table[[2, 0]].tolist()
    assert F.embedding(index, table).tolist() == table[[2, 0]].tolist()


def test_a_plain_tensor_is_taken_as_it_is_at_the_call() -> None:
    x, plain = place(values(4), init_device_mesh("cpu", 2), (Shard(0),)), torch.ones(4)
    y = x + plain
    plain.fill_(100)
    assert torch.equal(y.to_torch(), values(4) + 1)


def test_the_same_plain_tensor_twice_in_one_call() -> None:
    plain = torch.arange(4.0)
    x = place(values(4), init_device_mesh("cpu", 2), (Shard(0),))
    assert torch.equal(torch.addcmul(x, plain, plain).to_torch(), values(4) + plain * plain)


def test_gradients_flow_through_plain_constants() -> None:
    check(
        lambda x: (x * torch.arange(4.0) + torch.ones(5, 1)).masked_fill(torch.ones(5, 4).triu().bool(), 0.0),
        values(5, 4),
        grad=True,
        rule=False,
    )


def test_scalars_follow_the_mesh_of_the_others_and_whole_tensors_do_not() -> None:
    here, there = init_device_mesh("cpu", 2), DeviceMesh("cpu", [2, 3])
    x, other = place(values(4), here, (Shard(0),)), place(values(4), there, (Shard(0),))
    scalar = other.sum()
    for y in (x * scalar, scalar * x, torch.where(x > 0, scalar, x), x.clone().mul_(scalar)):
        assert y.device_mesh is here
    assert torch.allclose((x * scalar).to_torch(), values(4) * values(4).sum())
    assert (scalar + x.sum()).device_mesh is there and torch.allclose((scalar + x.sum()).to_torch(), 2 * values(4).sum())
    with pytest.raises(MeshError) as raised:
        x + other
    assert "ids 0, 1" in str(raised.value) and "ids 2, 3" in str(raised.value) and "redistribute(device_mesh" in str(raised.value)
    with pytest.raises(MeshError):
        torch.cat([x, other])
    with pytest.raises(MeshError):
        x.copy_(other)


def test_a_mix_with_two_meshes_and_a_plain_tensor_is_refused_too() -> None:
    x, other = place(values(4), init_device_mesh("cpu", 2), (Shard(0),)), place(values(4), DeviceMesh("cpu", [2, 3]), (Shard(0),))
    with pytest.raises(MeshError):
        torch.addcmul(x, other, torch.ones(4))


def test_parameters_that_are_plain() -> None:
    module = torch.nn.Linear(4, 3)
    x = place(values(5, 4), MESH, (Shard(0), R))
    out = module(x)
    assert isinstance(out, dtorch.Tensor)
    torch.testing.assert_close(out.detach().to_torch(), module(values(5, 4)).detach())
    out.sum().backward()
    plain = torch.nn.Linear(4, 3)
    plain.load_state_dict({k: v.detach().clone() for k, v in module.state_dict().items()})
    plain(values(5, 4)).sum().backward()
    grad = module.weight.grad
    torch.testing.assert_close(grad.to_torch() if isinstance(grad, dtorch.Tensor) else grad, plain.weight.grad)
    with torch.no_grad():
        module.weight -= 0.1 * module.weight.grad
    assert type(module.weight.data) is torch.Tensor
    torch.testing.assert_close(module.weight.detach(), (plain.weight - 0.1 * plain.weight.grad).detach())


def test_an_optimizer_over_plain_parameters_with_global_gradients() -> None:
    module, plain = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    plain.load_state_dict(module.state_dict())
    for m, x in ((module, place(values(5, 4), MESH, (Shard(0), R))), (plain, values(5, 4))):
        optimizer = torch.optim.AdamW(m.parameters(), lr=0.1, foreach=False)
        for _ in range(3):
            optimizer.zero_grad()
            m(x).pow(2).sum().backward()
            optimizer.step()
    torch.testing.assert_close(module.weight.detach(), plain.weight.detach())
