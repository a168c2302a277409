"""Training steps: loss, clipped gradients and AdamW are those of plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dtorch import DeviceMesh, init_device_mesh
from tests.models.zoo import (
    ANY_RULE,
    MESHES,
    MODELS,
    assert_close,
    batch,
    llama,
    mesh_named,
    mixtral,
    on_mesh,
    tied_llama,
    without_dropout,
)

pytestmark = ANY_RULE


def train(model: nn.Module, steps: int = 2) -> list[float]:
    """Losses and gradient norms of some steps on one batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs, seen = batch(), []
    for _ in range(steps):
        loss = model(**inputs, labels=inputs["input_ids"]).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen += [loss.item(), norm.item()]
    return seen


@pytest.mark.parametrize("mesh", MESHES)
def test_router_logits_of_all_layers_meet_in_the_loss(mesh: str) -> None:
    model, inputs = without_dropout(mixtral()), batch()
    distributed = on_mesh(model, mesh_named(mesh))
    for m in (model, distributed):
        out = m(**inputs, labels=inputs["input_ids"], output_router_logits=True)
        (out.loss + out.aux_loss).backward()
    for (name, a), b in zip(distributed.named_parameters(), model.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if b.grad is not None:
            assert a.grad.device_mesh is a.device_mesh
            assert_close(a.grad, b.grad)


def test_one_device_is_bit_identical() -> None:
    model = without_dropout(llama())
    distributed = on_mesh(model, DeviceMesh("cpu"))
    assert train(distributed) == train(model)
    for (name, a), b in zip(distributed.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(a.to_torch(), b), name


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_meshes(name: str, mesh: str) -> None:
    model = without_dropout(MODELS[name]())
    distributed = on_mesh(model, mesh_named(mesh))
    torch.testing.assert_close(train(distributed), train(model), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mesh", MESHES)
def test_gradients_lie_as_their_parameters(mesh: str) -> None:
    model, inputs = without_dropout(llama()), batch()
    distributed = on_mesh(model, mesh_named(mesh))
    for m in (model, distributed):
        m(**inputs, labels=inputs["input_ids"]).loss.backward()
        m(**inputs, labels=inputs["input_ids"]).loss.backward()
    for (name, a), b in zip(distributed.named_parameters(), model.parameters(), strict=True):
        assert a.grad.placements == a.placements, name
        assert_close(a.grad, b.grad)


def test_a_tied_weight_gets_the_gradients_of_both_uses() -> None:
    model, inputs = without_dropout(tied_llama()), batch()
    distributed = on_mesh(model, mesh_named("tp=2,pp=2"))
    assert distributed.lm_head.weight is distributed.model.embed_tokens.weight
    for m in (model, distributed):
        m(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert_close(distributed.lm_head.weight.grad, model.lm_head.weight.grad)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_with_dropout(reentrant: bool) -> None:
    model = llama(attention_dropout=0.3).train()
    distributed = on_mesh(model, mesh_named("tp=2,pp=2"))
    torch.manual_seed(3)
    expected = train(model)
    distributed.activation_checkpointing_enable({"use_reentrant": reentrant})
    torch.manual_seed(3)
    torch.testing.assert_close(train(distributed), expected, rtol=1e-5, atol=1e-6)


def test_dropout_is_the_same_under_the_same_seed() -> None:
    model = llama(attention_dropout=0.3).train()
    distributed = on_mesh(model, mesh_named("tp=2"))
    torch.manual_seed(3)
    expected = train(model)
    torch.manual_seed(3)
    torch.testing.assert_close(train(distributed), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("devices", [3, 4])
@pytest.mark.parametrize("heads", [(8, 2), (3, 1), (2, 2)])
def test_fewer_heads_than_devices(heads: tuple[int, int], devices: int) -> None:
    query, key_value = heads
    model = llama(hidden_size=4 * query, num_attention_heads=query, num_key_value_heads=key_value).train()
    distributed = on_mesh(model, init_device_mesh("cpu", devices, mesh_dim_names=("tp",)))
    torch.testing.assert_close(train(distributed), train(model), rtol=1e-5, atol=1e-6)
