"""Plain state dicts go into what lies on a mesh: modules' and optimizers'."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from dtorch import Shard, Tensor, init_device_mesh, parallelize
from dtorch.parallel.states import settle_state

MESHES = {"tp=2": ((2,), ("tp",)), "tp=3": ((3,), ("tp",)), "dp=2,tp=2": ((2, 2), ("dp", "tp")), "pp=2": ((2,), ("pp",))}
PLAN = {"first": "colwise", "second": "rowwise", "norm": "replicate"}


class Model(nn.Module):
    """Two layers, tied tables, buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4)
        self.first, self.second = nn.Linear(4, 7), nn.Linear(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 11, bias=False)
        self.out.weight = self.table.weight
        self.register_buffer("scale", torch.rand(4), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits (batch, 11) of ids (batch,)."""
        return self.out(self.norm(self.second(self.first(self.table(ids)).relu())) * self.scale)


def on(model: nn.Module, mesh: str) -> nn.Module:
    shape, names = MESHES[mesh]
    plan = PLAN if "tp" in names else {}
    return parallelize(copy.deepcopy(model), init_device_mesh("cpu", shape, mesh_dim_names=names), plan)


def values(state: Any) -> dict[str, torch.Tensor]:
    return {name: t.to_torch() if isinstance(t, Tensor) else t for name, t in state.items()}


def places(model: nn.Module) -> dict[str, tuple]:
    return {name: (t.device_mesh, t.placements) for name, t in model.state_dict().items()}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("assign", [False, True])
def test_a_plain_state_dict_is_split(mesh: str, assign: bool) -> None:
    source, target = Model(), on(Model(), mesh)
    before, scale = places(target), target.scale.to_torch()
    state = copy.deepcopy(source.state_dict())
    assert str(target.load_state_dict(state, assign=assign)) == "<All keys matched successfully>"
    found = values(target.state_dict())
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], expected) for name, expected in state.items())
    assert places(target) == before
    assert target.out.weight is target.table.weight
    assert torch.equal(target.scale.to_torch(), scale), "what no state dict holds stays"


@pytest.mark.parametrize("mesh", MESHES)
def test_what_is_assigned_trains_as_before(mesh: str) -> None:
    model, target = Model(), on(Model(), mesh)
    target.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    target.scale.copy_(model.scale)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, target)]
    for _ in range(2):
        assert step(target, optimizers[1]) == pytest.approx(step(model, optimizers[0]), rel=1e-5)
    assert all(p.grad.placements == p.placements for p in target.parameters())


def test_a_part_is_assigned_and_what_differs_is_no_longer_tied() -> None:
    target = on(Model(), "tp=2")
    before = places(target)
    target.first.load_state_dict({"weight": torch.ones(7, 4), "bias": torch.ones(7)}, assign=True)
    target.table.load_state_dict({"weight": torch.ones(11, 4)}, assign=True)
    assert places(target) == before
    assert target.out.weight is not target.table.weight
    state = values(target.state_dict())
    assert torch.equal(state["table.weight"], torch.ones(11, 4)) and not torch.equal(state["out.weight"], torch.ones(11, 4))
    target.load_state_dict({**state, "out.weight": state["table.weight"]}, assign=True)
    assert target.out.weight is target.table.weight


def test_global_tensors_may_be_assigned() -> None:
    source, target = on(Model(), "tp=3"), on(Model(), "dp=2,tp=2")
    before = places(target)
    target.load_state_dict(source.state_dict(), assign=True)
    assert places(target) == before
    assert all(torch.equal(a.to_torch(), b.to_torch()) for a, b in zip(source.parameters(), target.parameters(), strict=True))


PAIRS = list(itertools.permutations(MESHES, 2))


@pytest.mark.parametrize(("there", "here"), PAIRS)
@pytest.mark.parametrize("whole", [False, True])
def test_a_state_dict_from_another_mesh(there: str, here: str, whole: bool) -> None:
    source, target = on(Model(), there), on(Model(), here)
    before, state = places(target), source.state_dict()
    target.load_state_dict(values(state) if whole else state)
    assert places(target) == before
    found = values(target.state_dict())
    assert all(torch.equal(found[name], expected) for name, expected in values(state).items())
    assert all(isinstance(t, Tensor) for t in state.values()), "what was given stays"


@pytest.mark.parametrize("mesh", MESHES)
def test_strict_errors_are_those_of_torch(mesh: str) -> None:
    plain, target = Model(), on(Model(), mesh)
    state = plain.state_dict()
    state["first.weight"] = torch.ones(3, 3)
    state["more"] = state.pop("norm.bias")
    messages = []
    for model in (plain, target):
        with pytest.raises(RuntimeError) as caught:
            model.load_state_dict(state)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    del state["first.weight"]
    result = target.load_state_dict(state, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["first.weight", "norm.bias"], ["more"])


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = nn.functional.cross_entropy(model(torch.tensor([1, 5, 2, 9])), torch.tensor([3, 3, 0, 10]))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05, amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_goes_on_from_a_plain_state(kind: str, mesh: str) -> None:
    model = Model()
    optimizer = OPTIMIZERS[kind](model.parameters())
    step(model, optimizer)
    target = on(model, mesh)
    resumed = OPTIMIZERS[kind](target.parameters())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(2):
        assert step(target, resumed) == pytest.approx(step(model, optimizer), rel=1e-5)
    for parameter, state in resumed.state.items():
        for name, value in state.items():
            if value is not None and value.shape == parameter.shape:
                assert isinstance(value, Tensor) and value.placements == parameter.placements, name
    assert any(Shard(0) in p.placements for p in target.parameters()) == ("tp" in mesh)


@pytest.mark.parametrize(("there", "here"), PAIRS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_goes_on_on_another_mesh(kind: str, there: str, here: str) -> None:
    source = on(Model(), there)
    optimizer = OPTIMIZERS[kind](source.parameters())
    step(source, optimizer)
    target = on(Model(), here)
    target.load_state_dict(source.state_dict())
    target.scale.copy_(source.scale.to_torch())
    resumed = OPTIMIZERS[kind](target.parameters())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(2):
        assert step(target, resumed) == pytest.approx(step(source, optimizer), rel=1e-5)
    for parameter, state in resumed.state.items():
        assert all(v.device_mesh is parameter.device_mesh for v in state.values() if isinstance(v, Tensor) and v.ndim)


def test_state_is_looked_through_once_after_each_load() -> None:
    model = on(Model(), "tp=2")
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    step(model, optimizer)
    moments = {p: s["exp_avg"] for p, s in optimizer.state.items()}
    settle_state(optimizer)
    assert all(optimizer.state[p]["exp_avg"] is m for p, m in moments.items())
    saved = {
        "state": {
            n: {k: v.to_torch() if isinstance(v, Tensor) else v for k, v in s.items()}
            for n, s in optimizer.state_dict()["state"].items()
        },
        "param_groups": optimizer.state_dict()["param_groups"],
    }
    optimizer.load_state_dict(saved)
    assert not any(isinstance(s["exp_avg"], Tensor) for s in optimizer.state.values())
    settle_state(optimizer)
    assert all(isinstance(s["exp_avg"], Tensor) and s["step"].ndim == 0 for s in optimizer.state.values())


def test_plain_optimizers_are_left_alone() -> None:
    model = Model()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    step(model, optimizer)
    assert not any(isinstance(v, Tensor) for s in optimizer.state.values() for v in s.values())


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("mesh", MESHES)
def test_what_was_changed_since_loads_too(mesh: str, assign: bool) -> None:
    """Weights that were put there later, replaced by others or taken away are not as the layout knows them."""
    models = model, target = Model(), on(Model(), mesh)
    for one in models:
        torch.nn.utils.parametrizations.weight_norm(one.first)
        one.added = nn.Linear(2, 3)
        one.register_buffer("noted", torch.ones(2))
        one.out = nn.Linear(4, 11)
    state = copy.deepcopy(model.state_dict())
    assert str(target.load_state_dict(state, assign=assign)) == "<All keys matched successfully>"
    found = values(target.state_dict())
    assert found.keys() == state.keys() and all(torch.equal(found[name], expected) for name, expected in state.items())
