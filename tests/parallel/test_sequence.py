"""Sequence parallelism: the numbers of plain PyTorch, on any mesh and for sequences of any length."""

from __future__ import annotations

import copy

import pytest
import torch

import dtorch
from dtorch import Replicate, Shard, init_device_mesh
from dtorch.parallel import plan_of
from tests.models.zoo import (
    ANY_RULE,
    MODELS,
    PAD,
    VOCABULARY,
    assert_close,
    assert_same_training,
    llama,
    on_mesh,
    tied_llama,
    without_dropout,
)

pytestmark = ANY_RULE

MESHES = {
    "tp": (3,),
    "dp,tp": (2, 2),
    "tp,pp": (2, 2),
    "ring_cp,tp": (2, 2),
    "tp,ulysses_cp": (2, 2),
}


def with_sp(model: torch.nn.Module, names: str, shape: tuple[int, ...] | None = None) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", shape or MESHES[names], mesh_dim_names=tuple(names.split(",")))
    return dtorch.parallelize(copy.deepcopy(model), mesh, sp=True)


def tokens(batch: int = 2, length: int = 7) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_gradients(name: str, mesh: str) -> None:
    model, ids = without_dropout(MODELS[name]()), tokens()
    distributed = with_sp(model, mesh)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    assert_same_training(distributed, model, input_ids=ids, attention_mask=mask, labels=ids)


@pytest.mark.parametrize("mesh", MESHES)
def test_greedy_generation(mesh: str) -> None:
    model, ids = llama(), tokens()
    options = {"max_new_tokens": 5, "pad_token_id": PAD, "do_sample": False}
    assert torch.equal(with_sp(model, mesh).generate(ids, **options).to_torch(), model.generate(ids, **options))


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_short_sequences_stay_whole(length: int) -> None:
    model, ids = tied_llama(), tokens(length=length)
    distributed = with_sp(model, "tp", (3,))
    seen = []
    distributed.model.layers[1].register_forward_pre_hook(lambda module, args: seen.append(args[0].placements))
    with torch.no_grad():
        assert_close(distributed(ids).logits, model(ids).logits)
    assert seen == [(Shard(1),) if length >= 3 else (Replicate(),)]


def test_checkpointed_activations() -> None:
    model, ids = llama().train(), tokens()
    distributed = with_sp(model, "dp,tp")
    distributed.activation_checkpointing_enable({"use_reentrant": False})
    for m in (model, distributed):
        m(ids, labels=ids).loss.backward()
    for a, b in zip(distributed.parameters(), model.parameters(), strict=True):
        assert_close(a.grad, b.grad)


def test_it_is_part_of_the_plan() -> None:
    plan = plan_of(llama(), sp=True)
    assert plan.source == "the model's own plan, with sp"
    assert plan.inputs("model.layers.1.mlp.up_proj") == plan.inputs("lm_head") == {"tp": Replicate()}
    assert plan.outputs("model.layers.1.mlp.down_proj") == plan.outputs("model.embed_tokens") == {"tp": Shard(1)}
    model, mesh = llama(), init_device_mesh("cpu", 2, mesh_dim_names=("tp",))
    assert_close(on_mesh(model, mesh, plan)(tokens()).logits, model(tokens()).logits)


def test_without_the_axis_it_changes_nothing() -> None:
    model, ids = llama(), tokens()
    with dtorch.explain() as report, torch.no_grad():
        out = with_sp(model, "dp", (2,))(ids)
    assert not report.events
    assert_close(out.logits, model(ids).logits)
