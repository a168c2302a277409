"""Experts over an axis ``ep``: as on one device, whoever is chosen, and only tokens travel."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GptOssConfig, MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import dtorch
from dtorch import Replicate, Shard, communication, describe, explain, init_device_mesh
from tests.models.zoo import ANY_RULE, VOCABULARY, assert_close, llama, mixtral, qwen2_moe, qwen3_moe, without_dropout

pytestmark = ANY_RULE

MODELS = {"mixtral": mixtral, "qwen2_moe": qwen2_moe, "qwen3_moe": qwen3_moe}
MESHES = {
    "ep=2": ((2,), ("ep",)),
    "ep=3": ((3,), ("ep",)),
    "ep=4": ((4,), ("ep",)),
    "dp=2,ep=2": ((2, 2), ("dp", "ep")),
    "ep=2,tp=2": ((2, 2), ("ep", "tp")),
    "tp=2,ep=2": ((2, 2), ("tp", "ep")),
    "ep=2,pp=2": ((2, 2), ("ep", "pp")),
    "ep=2,fsdp=2": ((2, 2), ("ep", "fsdp")),
    "fsdp=2,ep=2,tp=2": ((2, 2, 2), ("fsdp", "ep", "tp")),
    "ring_cp=2,ep=2": ((2, 2), ("ring_cp", "ep")),
    "ep=2,ulysses_cp=2": ((2, 2), ("ep", "ulysses_cp")),
    "tp=2": ((2,), ("tp",)),
    "tp=3": ((3,), ("tp",)),
    "tp=5": ((5,), ("tp",)),
    "dp=2,tp=2": ((2, 2), ("dp", "tp")),
    "fsdp=2,tp=2": ((2, 2), ("fsdp", "tp")),
    "tp=2,ring_cp=2": ((2, 2), ("tp", "ring_cp")),
}
CELLS = [("mixtral", mesh) for mesh in MESHES] + [
    ("qwen2_moe", "ep=3"),
    ("qwen2_moe", "ep=2,tp=2"),
    ("qwen2_moe", "tp=3"),
    ("qwen2_moe", "dp=2,tp=2"),
    ("qwen3_moe", "ep=2"),
    ("qwen3_moe", "dp=2,ep=2"),
]
TOKENS = 12


def mesh_named(name: str) -> dtorch.DeviceMesh:
    shape, names = MESHES[name]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def pair(model: nn.Module, mesh: str) -> tuple[nn.Module, nn.Module]:
    return model, dtorch.parallelize(copy.deepcopy(model), mesh_named(mesh))


def inputs(sequences: int = 6) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (sequences, 5))


def check_gradients(ours: nn.Module, plain: nn.Module) -> None:
    for (name, a), b in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        error = (a.grad.to_torch() - b[1].grad).abs().max()
        assert error <= 1e-4 * max(b[1].grad.abs().max(), 1e-3), f"{name} is off by {error}"


@pytest.mark.parametrize(("name", "mesh"), CELLS)
def test_models(name: str, mesh: str) -> None:
    plain, ours = pair(without_dropout(MODELS[name]()), mesh)
    given = inputs()
    results = [m(input_ids=given, labels=given) for m in (plain, ours)]
    assert_close(results[1].logits, results[0].logits)
    for result in results:
        result.loss.backward()
    check_gradients(ours, plain)


@pytest.mark.parametrize("sequences", [1, 4])
@pytest.mark.parametrize("mesh", ["ep=3", "ep=2,tp=2", "tp=3"])
def test_generation(mesh: str, sequences: int) -> None:
    plain, ours = pair(mixtral(), mesh)
    given = inputs(sequences)
    expected, tokens = (m.generate(given, max_new_tokens=3, do_sample=False, pad_token_id=0) for m in (plain, ours))
    assert torch.equal(tokens.to_torch(), expected)


def test_two_exchanges_a_layer_and_no_gather() -> None:
    _, ours = pair(without_dropout(mixtral()), "ep=3")
    with explain() as report, communication("forbid"):
        logits = ours(input_ids=inputs()).logits
    assert Counter((e.comm.kind, e.comm.axis) for e in report.events) == {("all_to_all", "ep"): 2 * 2}
    with explain() as report:
        logits.sum().backward()
    assert Counter(e.comm.kind for e in report.events if e.comm.operator == "rows") == {"all_to_all": 2 * 2}


@pytest.mark.parametrize("mesh", ["ep=3", "dp=2,ep=2"])
def test_nothing_but_tokens_and_their_gradients_travels(mesh: str) -> None:
    ours = dtorch.parallelize(mixtral_experts(), mesh_named(mesh))
    given = torch.randn(TOKENS, 8), choices("any", 4), torch.rand(TOKENS, 2)
    places = [Shard(0)] * len(MESHES[mesh][0])
    placed = [dtorch.Tensor(t, device_mesh=mesh_named(mesh), placements=places) for t in given]
    with explain() as report:
        out = ours(placed[0].requires_grad_(), placed[1], placed[2].requires_grad_())
    assert Counter((e.comm.kind, e.comm.axis) for e in report.events) == {("all_to_all", "ep"): 2}
    with explain() as report:
        out.sum().backward()
    over_dp = {("all_reduce", "dp"): 2} if "dp" in mesh else {}
    assert Counter((e.comm.kind, e.comm.axis) for e in report.events) == {("all_to_all", "ep"): 2, **over_dp}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_pipelines(schedule: str) -> None:
    plain, ours = pair(without_dropout(mixtral()), "ep=2,pp=2")
    given = inputs()
    loss = plain(input_ids=given, labels=given).loss
    loss.backward()
    step = dtorch.pipeline(ours, micro_batches=2, schedule=schedule)
    torch.testing.assert_close(step.step(input_ids=given, labels=given).to_torch(), loss.detach())
    check_gradients(ours, plain)


@pytest.mark.parametrize("mesh", ["ep=2,tp=2", "tp=3", "dp=2,tp=2"])
@pytest.mark.parametrize("name", MODELS)
def test_sequence_parallel_norms(name: str, mesh: str) -> None:
    plain, given = without_dropout(MODELS[name]()), inputs()
    ours = dtorch.parallelize(copy.deepcopy(plain), mesh_named(mesh), sp=True)
    results = [m(input_ids=given, labels=given) for m in (plain, ours)]
    assert_close(results[1].logits, results[0].logits)
    for result in results:
        result.loss.backward()
    check_gradients(ours, plain)


@pytest.mark.parametrize(("mesh", "whole"), [("tp=3", True), ("tp=5", False)])
def test_over_tp_alone_they_are_cut_only_where_some_devices_would_have_none(mesh: str, whole: bool) -> None:
    ours = dtorch.parallelize(mixtral(), mesh_named(mesh))
    weights = ours.model.layers[0].mlp.experts.down_proj
    assert (weights.placements == (Shard(0),)) == whole
    assert min(weights.local_shape((d,)).numel() for d in range(weights.device_mesh.size())) > 0


def test_what_all_tokens_share_is_split_though_the_models_own_plan_leaves_it_out() -> None:
    ours = dtorch.parallelize(qwen2_moe(), mesh_named("tp=2"))
    shared = ours.model.layers[0].mlp.shared_expert
    assert shared.gate_proj.weight.placements == shared.up_proj.weight.placements == (Shard(0),)
    assert shared.down_proj.weight.placements == (Shard(1),)


def test_a_batch_that_is_too_short_is_summed_up() -> None:
    plain, ours = pair(mixtral(), "ep=2")
    given = inputs(1)
    with explain() as report, torch.no_grad():
        assert_close(ours(input_ids=given).logits, plain(input_ids=given).logits)
    assert Counter(e.comm.kind for e in report.events) == {"all_reduce": 2}


def mixtral_experts(implementation: str = "grouped_mm", count: int = 4) -> nn.Module:
    config = MixtralConfig(hidden_size=8, intermediate_size=12, num_local_experts=count)
    config._experts_implementation = implementation
    return filled(MixtralExperts(config))


def gpt_oss_experts(implementation: str = "grouped_mm") -> nn.Module:
    """With biases, transposed, gates and values in turn."""
    config = GptOssConfig(hidden_size=8, intermediate_size=12, num_local_experts=4)
    config._experts_implementation = implementation
    return filled(GptOssExperts(config))


def filled(module: nn.Module) -> nn.Module:
    for p in module.parameters():
        nn.init.normal_(p)
    return module


def choices(kind: str, count: int) -> torch.Tensor:
    if kind == "one":
        return torch.full((TOKENS, 2), count - 1)
    if kind == "first half":
        return torch.randint(0, count // 2, (TOKENS, 2))
    return torch.stack([torch.randperm(count)[:2] for _ in range(TOKENS)])


def compare(module: nn.Module, mesh: str, kind: str = "any", split: bool = True) -> None:
    """Results, and the gradients of tokens, weights and parameters."""
    ours = dtorch.parallelize(copy.deepcopy(module), mesh_named(mesh))
    index = choices(kind, module.num_experts)
    tokens, weights = torch.randn(TOKENS, 8), torch.rand(TOKENS, 2)
    results, grads = [], []
    for m in (module, ours):
        leaves: list[Any] = [tokens.clone().requires_grad_(), weights.clone().requires_grad_()]
        given: list[Any] = [leaves[0], index, leaves[1]]
        if m is ours:
            places = [Shard(0) if split and n != "tp" else Replicate() for n in MESHES[mesh][1]]
            given = [dtorch.Tensor(t.detach(), device_mesh=mesh_named(mesh), placements=places) for t in given]
            leaves = [given[0].requires_grad_(), given[2].requires_grad_()]
        out = m(*given)
        results.append(out)
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        grads.append([t.grad for t in leaves])
    assert_close(results[1], results[0])
    for a, b in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(a.to_torch(), b, rtol=1e-4, atol=1e-5)
    check_gradients(ours, module)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("kind", ["one", "first half", "any"])
@pytest.mark.parametrize("mesh", ["ep=3", "dp=2,ep=2", "tp=2,ep=2"])
def test_whoever_is_chosen(mesh: str, kind: str, split: bool) -> None:
    compare(mixtral_experts(), mesh, kind, split)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_implementations(implementation: str) -> None:
    compare(mixtral_experts(implementation), "ep=3")
    compare(gpt_oss_experts(implementation), "ep=3")


def test_fewer_experts_than_devices() -> None:
    compare(mixtral_experts(count=2), "ep=4")
    compare(mixtral_experts(count=2), "ep=2,tp=2", split=False)


def test_devices_without_tokens() -> None:
    plain, ours = pair(mixtral_experts(), "ep=3")
    given = torch.randn(TOKENS, 8), choices("any", 4), torch.rand(TOKENS, 2)
    places = [Shard(0, (0, TOKENS, 0))]
    placed = [dtorch.Tensor(t, device_mesh=mesh_named("ep=3"), placements=places) for t in given]
    torch.testing.assert_close(ours(*placed).to_torch(), plain(*given))


def test_a_plan_says_who_has_how_many() -> None:
    plain, mesh = mixtral_experts(), mesh_named("ep=2")
    row = {"ep": Shard(0, sizes=(3, 1))}
    ours = dtorch.parallelize(copy.deepcopy(plain), mesh, {"gate_up_proj": row, "down_proj": row})
    assert ours.down_proj.local_shape((0,)) == (3, 8, 12)
    given = torch.randn(TOKENS, 8), choices("any", 4), torch.rand(TOKENS, 2)
    torch.testing.assert_close(ours(*given).to_torch(), plain(*given))


def test_it_is_said_what_is_done() -> None:
    assert "experts are spread over ep" in str(describe(dtorch.parallelize(mixtral(), mesh_named("ep=2"))))
    assert "no experts that ep could spread" in str(describe(dtorch.parallelize(llama(), mesh_named("ep=2"))))


def test_copies_and_other_meshes() -> None:
    plain, ours = pair(mixtral_experts(), "ep=3")
    given = torch.randn(TOKENS, 8), choices("any", 4), torch.rand(TOKENS, 2)
    copied = copy.deepcopy(ours)
    with torch.no_grad():
        ours.down_proj.zero_()
    torch.testing.assert_close(copied(*given).to_torch(), plain(*given))
    dtorch.parallelize(copied, mesh_named("ep=2,tp=2"))
    torch.testing.assert_close(copied(*given).to_torch(), plain(*given))
    dtorch.parallelize(copied, init_device_mesh("cpu", 2, mesh_dim_names=("dp",)))
    assert "forward" not in vars(copied)
    torch.testing.assert_close(copied(*given).to_torch(), plain(*given))
