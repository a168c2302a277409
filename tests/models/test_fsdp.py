"""Models over an fsdp axis, alone and with others: forward, gradients, AdamW and generation as plain PyTorch's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import dtorch
from dtorch import Shard, explain, init_device_mesh
from tests.models.zoo import ANY_RULE, MODELS, assert_close, batch, llama, tied_llama, without_dropout

pytestmark = ANY_RULE

MESHES = {
    "fsdp=2": ((2,), ("fsdp",)),
    "fsdp=3": ((3,), ("fsdp",)),
    "fsdp=4": ((4,), ("fsdp",)),
    "dp=2,fsdp=2": ((2, 2), ("dp", "fsdp")),
    "fsdp=2,tp=2": ((2, 2), ("fsdp", "tp")),
    "tp=2,fsdp=3": ((2, 3), ("tp", "fsdp")),
    "fsdp=2,tp=2,pp=2": ((2, 2, 2), ("fsdp", "tp", "pp")),
}


def inputs() -> dict[str, torch.Tensor]:
    """Six sequences."""
    return {name: torch.cat([t, t.flip(1), t]) for name, t in batch().items()}


def pair(model: nn.Module, mesh: str, zero: int = 3) -> tuple[nn.Module, nn.Module]:
    shape, names = MESHES[mesh]
    distributed = copy.deepcopy(model)
    return model, dtorch.parallelize(distributed, init_device_mesh("cpu", shape, mesh_dim_names=names), zero=zero)


def check(model: nn.Module, mesh: str, zero: int = 3) -> None:
    """Logits, the gradients of a loss, and the weights after three steps."""
    pair_ = pair(without_dropout(model), mesh, zero)
    given = inputs()
    plain, ours = (m(**given, labels=given["input_ids"]) for m in pair_)
    assert_close(ours.logits, plain.logits)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in pair_]
    for step in range(3):
        for m, optimizer in zip(pair_, optimizers, strict=True):
            optimizer.zero_grad()
            m(**given, labels=given["input_ids"]).loss.backward()
            nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        if step == 0:
            for a, b in zip(pair_[1].parameters(), pair_[0].parameters(), strict=True):
                torch.testing.assert_close(a.grad.to_torch(), b.grad, rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
    for (name, a), b in zip(pair_[1].named_parameters(), pair_[0].parameters(), strict=True):
        # Adam divides by the root of what may be next to nothing.
        error = (a.to_torch() - b).abs().max()
        assert error <= 1e-4, f"{name} is off by {error}"


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_training(name: str, mesh: str) -> None:
    check(MODELS[name](), mesh)


@pytest.mark.parametrize("mesh", ["fsdp=2", "fsdp=2,tp=2,pp=2"])
@pytest.mark.parametrize("name", ["tied_llama", "bert", "mixtral"])
def test_other_models(name: str, mesh: str) -> None:
    check(MODELS[name](), mesh)


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("mesh", ["fsdp=3", "fsdp=2,tp=2,pp=2"])
def test_lesser_forms(mesh: str, zero: int) -> None:
    check(tied_llama(), mesh, zero)


def test_uneven_heads_are_split_both_ways() -> None:
    _, ours = pair(llama(), "fsdp=2,tp=2")
    assert ours.model.layers[0].self_attn.q_proj.weight.placements == (Shard(1), Shard(0, (24, 12)))


@pytest.mark.parametrize("mesh", ["fsdp=2", "fsdp=2,tp=2", "fsdp=2,tp=2,pp=2"])
def test_one_collective_a_block(mesh: str) -> None:
    """Layers and the model itself; with stages, the model's own block has a part on each."""
    _, ours = pair(without_dropout(llama(num_hidden_layers=3)), mesh)
    given = inputs()
    blocks = 5 if "pp" in mesh else 4
    with explain() as report:
        loss = ours(**given, labels=given["input_ids"]).loss
    events = [e.comm for e in report.events if e.comm.operator.startswith("fsdp ")]
    assert [(c.kind, c.axis) for c in events] == [("all_gather", "fsdp")] * blocks
    with explain() as report:
        loss.backward()
    over = [e.comm for e in report.events if e.comm.operator.startswith("fsdp ") and e.comm.axis == "fsdp"]
    kinds = [c.kind for c in over]
    assert kinds.count("reduce_scatter") == blocks and kinds.count("all_gather") <= blocks
    per_layer = {c.nbytes for c in over if c.kind == "all_gather"}
    assert len(per_layer) <= 1 + blocks - 3, "layers are alike"


@pytest.mark.parametrize("mesh", ["fsdp=2", "dp=2,fsdp=2", "fsdp=2,tp=2,pp=2"])
def test_generation(mesh: str) -> None:
    plain, ours = pair(tied_llama(), mesh)
    given = inputs()
    expected, tokens = (m.generate(**given, max_new_tokens=4, do_sample=False, pad_token_id=0) for m in (plain, ours))
    assert torch.equal(tokens.to_torch(), expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    plain, ours = pair(without_dropout(llama()), "fsdp=2,tp=2,pp=2")
    given = inputs()
    ours.activation_checkpointing_enable({"use_reentrant": reentrant})
    for m in (plain, ours):
        m(**given, labels=given["input_ids"]).loss.backward()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad.to_torch(), b.grad, rtol=1e-4, atol=1e-6)
