"""``parallelize`` in place: parameters, buffers, ties, memory, and running it twice."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import dtorch
from dtorch import DeviceMesh, Replicate, Shard, UsageError, describe, init_device_mesh
from tests.models.zoo import ANY_RULE, llama, mesh_named, on_mesh, tied_llama

pytestmark = ANY_RULE

PAIR = init_device_mesh("cpu", 2, mesh_dim_names=("tp",))


def test_it_works_in_place_and_returns_the_module() -> None:
    model = nn.Linear(4, 6)
    weight = model.weight.detach().clone()
    assert dtorch.parallelize(model, PAIR, {"weight": "rowwise", "bias": {"tp": Shard(0)}}) is model
    assert isinstance(model.weight, nn.Parameter) and isinstance(model.weight, dtorch.Tensor)
    assert model.weight.placements == (Shard(1),)
    assert model.bias.placements == (Shard(0),)
    assert torch.equal(model.weight.to_torch(), weight)


def test_flags_and_gradients_come_along() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].weight.requires_grad_(False)
    model[0].bias.grad = torch.ones(2)
    dtorch.parallelize(model, PAIR)
    assert [p.requires_grad for p in model.parameters()] == [False, True, True, True]
    assert torch.equal(model[0].bias.grad.to_torch(), torch.ones(2))
    assert isinstance(model[1].num_batches_tracked, dtorch.Tensor)
    assert set(model.state_dict()) == {
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }


def test_the_old_weights_are_let_go() -> None:
    model = llama()
    old = [weakref.ref(p) for p in model.parameters()]
    dtorch.parallelize(model, PAIR)
    gc.collect()
    assert [ref() for ref in old if ref() is not None] == []


def test_tied_weights_stay_one_parameter() -> None:
    model = on_mesh(tied_llama(), mesh_named("tp=2,pp=2"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert len([n for n, _ in model.named_parameters() if "embed" in n or "lm_head" in n]) == 1
    assert model.lm_head.weight.device_mesh is model.model.layers[0].mlp.up_proj.weight.device_mesh


def test_a_module_under_two_names_is_placed_once() -> None:
    shared = nn.Linear(2, 2)
    model = dtorch.parallelize(nn.ModuleDict({"a": shared, "b": shared}), PAIR)
    assert model["a"].weight is model["b"].weight
    assert torch.equal(
        model["b"](torch.ones(1, 2)).detach().to_torch(), (shared.weight.sum(1) + shared.bias).detach().to_torch()[None]
    )


def test_each_stage_has_its_own_mesh() -> None:
    mesh = mesh_named("dp=1,tp=2,pp=2")
    model, (first, second) = on_mesh(llama(), mesh), mesh.unbind("pp")
    assert model.model.layers[0].mlp.up_proj.weight.device_mesh is first
    assert model.model.layers[1].mlp.up_proj.weight.device_mesh is second
    assert model.lm_head.weight.device_mesh is second


def test_a_second_time_moves_it_on() -> None:
    plain, x = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), torch.randn(4, 4)
    model = on_mesh(plain, mesh_named("tp=2,pp=2"), {"0": "colwise", "1": "rowwise"})
    dtorch.parallelize(model, init_device_mesh("cpu", 4, mesh_dim_names=("dp",)))
    assert model[0].weight.placements == (Replicate(),)
    out = model(x)
    assert out.placements == (Shard(0),)
    assert torch.allclose(out.detach().to_torch(), plain(x))


def test_a_copy_works_on_its_own() -> None:
    model = on_mesh(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), mesh_named("tp=2,pp=2"))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.zero_()
    x = torch.randn(2, 4)
    assert not torch.allclose(model(x).detach().to_torch(), twin(x).detach().to_torch())
    assert str(describe(twin)) == str(describe(model))


def test_plain_weights_can_be_loaded() -> None:
    model, other = llama(), llama()
    distributed = on_mesh(model, mesh_named("tp=2,pp=2"))
    distributed.load_state_dict(other.state_dict())
    for a, b in zip(distributed.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.detach().to_torch(), b)


@pytest.mark.parametrize("model", [nn.Linear(2, 2, device="meta"), nn.LazyLinear(2)], ids=["meta", "lazy"])
def test_weights_without_data_are_refused(model: nn.Module) -> None:
    with pytest.raises(UsageError, match=r"(?s)weight without data.*load or initialise"):
        dtorch.parallelize(model, PAIR)


@pytest.mark.parametrize("module", [nn.Linear, torch.zeros(3), None, nn.Linear(3, 4).forward])
def test_what_is_no_module_is_refused(module: Any) -> None:
    with pytest.raises(UsageError, match=r"(?s)for a module.*torch.nn.Module"):
        dtorch.parallelize(module, PAIR)


def test_a_placement_that_does_not_fit_leaves_the_module_alone() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(dtorch.PlacementError, match="shard dim"):
        dtorch.parallelize(model, PAIR, {"bias": {"tp": Shard(1)}})
    assert type(model.weight.data) is torch.Tensor


def test_a_single_device_needs_no_names() -> None:
    model = on_mesh(nn.Linear(2, 2), DeviceMesh("cpu"))
    assert model.weight.placements == (Replicate(),)


@pytest.mark.parametrize("first", [{"tp": 2}, {"fsdp": 3}, {"dp": 2}])
@pytest.mark.parametrize("then", [{"fsdp": 2}, {"pp": 2}, {"dp": 2, "tp": 2}])
def test_a_part_that_was_distributed_before_moves_on_with_the_whole(first: dict[str, int], then: dict[str, int]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 6)) for _ in range(3)])
    model, x = copy.deepcopy(plain), torch.randn(4, 6)
    dtorch.parallelize(model[1], init_device_mesh("cpu", tuple(first.values()), mesh_dim_names=tuple(first)))
    dtorch.parallelize(model, init_device_mesh("cpu", tuple(then.values()), mesh_dim_names=tuple(then)))
    for one in (model, plain):
        one(x).square().sum().backward()
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(found.grad, dtorch.Tensor) and wanted.grad is not None
        torch.testing.assert_close(found.grad.to_torch(), wanted.grad)
    model.load_state_dict(plain.state_dict(), assign=True)
    torch.testing.assert_close(model(x).to_torch(), plain(x))
    with pytest.raises(dtorch.UsageError, match="lies on no mesh"):
        dtorch.describe(model[1])
