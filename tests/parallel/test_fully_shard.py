"""``fully_shard``: modules that lie on a mesh already, split over ``fsdp`` and trained beside plain PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import dtorch
from dtorch import DeviceMesh, Replicate, Shard, UsageError, explain, init_device_mesh
from dtorch.nn import fully_shard
from tests.models.zoo import ANY_RULE

pytestmark = ANY_RULE

MESHES = {
    "fsdp": (3,),
    "dp,fsdp": (2, 2),
    "fsdp,tp": (2, 2),
    "tp,fsdp": (3, 2),
    "dp,tp": (2, 2),
}


def mesh_named(names: str) -> DeviceMesh:
    return init_device_mesh("cpu", MESHES[names], mesh_dim_names=tuple(names.split(",")))


class Layer(nn.Module):
    def __init__(self, column: type[nn.Module], row: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), column(8, 21), row(21, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, column: type[nn.Module] = nn.Linear, row: type[nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(column, row) for _ in range(3))
        self.first, self.last = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def plain() -> Model:
    torch.manual_seed(3)
    return Model()


def split(mesh: DeviceMesh, **options: int) -> Model:
    with dtorch.use_mesh(mesh):
        model = Model(dtorch.nn.ColumnParallelLinear, dtorch.nn.RowParallelLinear)
    model.load_state_dict(plain().state_dict())
    return fully_shard(model, **options)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("names", MESHES)
def test_training_goes_as_on_one_device(names: str, zero: int) -> None:
    mesh, expected = mesh_named(names), plain()
    model = split(mesh, zero=zero)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, expected)]
    data = torch.randn(5, 4, 8)
    placed = dtorch.Tensor(data, device_mesh=mesh).redistribute_by_dict({"dp": Shard(0), "fsdp": Shard(0)})
    for _ in range(3):
        for m, given, optimizer in ((model, placed, optimizers[0]), (expected, data, optimizers[1])):
            optimizer.zero_grad()
            m(given).square().mean().backward()
            optimizer.step()
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        axes = zip(names.split(","), a.placements, strict=True)
        wanted = [Replicate() if zero == 1 and name == "fsdp" else p for name, p in axes]
        assert list(a.grad.placements) == wanted
        torch.testing.assert_close(a.detach().to_torch(), b.detach())


def test_what_is_split_and_what_travels() -> None:
    model = split(mesh_named("fsdp,tp"))
    layer = model.layers[1]
    assert layer.up.weight.placements == (Shard(1), Shard(0))
    assert layer.down.weight.placements == (Shard(0), Shard(1))
    assert layer.norm.weight.placements == (Shard(0), Replicate())
    assert model.last.weight is model.first.weight
    with explain() as report, torch.no_grad():
        model(torch.randn(5, 8))
    gathers = [event for event in report.events if event.comm.operator == "fsdp weights"]
    assert len(gathers) == 4, "three layers, and the tied weight"
    assert {event.comm.kind for event in report.events if event not in gathers} == {"all_reduce"}


def test_a_second_call_starts_anew() -> None:
    model = split(mesh_named("fsdp"), zero=1)
    fully_shard(model)
    x = torch.randn(5, 8)
    model(x).sum().backward()
    plain_model = plain()
    plain_model(x).sum().backward()
    for a, b in zip(model.parameters(), plain_model.parameters(), strict=True):
        assert a.grad.placements == a.placements
        torch.testing.assert_close(a.grad.to_torch(), b.grad)


@pytest.mark.parametrize("names", MESHES)
def test_what_is_assigned_lies_as_before_and_trains(names: str) -> None:
    torch.manual_seed(8)
    expected, model = Model(), split(mesh_named(names))
    lies = [p.placements for p in model.parameters()]
    model.load_state_dict(expected.state_dict(), assign=True)
    assert [p.placements for p in model.parameters()] == lies
    assert model.last.weight is model.first.weight
    x = torch.randn(5, 8)
    for m in (copy.deepcopy(model), expected):
        m(x).square().mean().backward()
        gradients = [p.grad for p in m.parameters()]
        if m is not expected:
            assert [g.placements for g in gradients] == lies
            ours = [g.to_torch() for g in gradients]
    for a, b in zip(ours, gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_layers_may_be_split_before_the_whole() -> None:
    x, mesh = torch.randn(6, 8), mesh_named("fsdp")
    wanted, model = plain(), split(mesh)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    for one in (wanted, model):
        one(x).square().mean().backward()
    for found, expected in zip(model.parameters(), wanted.parameters(), strict=True):
        assert isinstance(found.grad, dtorch.Tensor) and found.grad.placements == found.placements
        torch.testing.assert_close(found.grad.to_torch(), expected.grad)
    with explain() as report:
        model(x)
    assert sum(e.comm.axis == "fsdp" and e.comm.operator.startswith("fsdp ") for e in report.events) == 4, "one a block"


def test_frozen_weights_stay_frozen() -> None:
    mesh = mesh_named("fsdp")
    with dtorch.use_mesh(mesh):
        model = Model()
    model.layers[0].requires_grad_(False)
    model = fully_shard(model)
    model(torch.randn(5, 8)).sum().backward()
    assert [p.grad is None for p in model.layers[0].parameters()] == [True] * 6
    assert model.layers[1].up.weight.grad.placements == (Shard(0),)


def test_what_is_not_on_a_mesh_is_refused() -> None:
    with pytest.raises(UsageError, match=r"(?s)plain parameters.*use_mesh"):
        fully_shard(plain())
    with pytest.raises(UsageError, match="was parallelized"):
        fully_shard(dtorch.parallelize(plain(), mesh_named("fsdp")))
    with pytest.raises(UsageError, match="zero=4"):
        split(mesh_named("fsdp"), zero=4)
