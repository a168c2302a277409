"""Models of a library that knows nothing of meshes: more devices than heads, corrections beside, loading, checkpointing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import dtorch
from dtorch import init_device_mesh
from tests.models.zoo import ANY_RULE, assert_close, batch, gpt2, llama, on_mesh, tied_llama, without_dropout

pytestmark = ANY_RULE


def names(*axes: str) -> dict:
    return {"mesh_dim_names": axes}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    inputs = batch()
    model.zero_grad()
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("ways", [4, 8])
@pytest.mark.parametrize("make", [llama, gpt2, tied_llama])
def test_more_devices_than_heads(make: object, ways: int) -> None:
    """Nothing in the configuration is halved by hand; forward and backward are those of one device."""
    model = without_dropout(make())
    distributed = on_mesh(model, init_device_mesh("cpu", ways, **names("tp")))
    assert distributed.config.to_dict() == model.config.to_dict()
    assert_close(distributed(**batch()).logits, model(**batch()).logits)
    expected, found = gradients(model), gradients(distributed)
    assert expected.keys() == found.keys()
    for name, grad in expected.items():
        assert_close(found[name], grad)


class Corrected(nn.Module):
    """A frozen layer and a plain low-rank correction of what it gives."""

    def __init__(self, layer: nn.Module, width: int, out: int) -> None:
        super().__init__()
        self.layer = layer
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


def test_plain_corrections_in_a_distributed_model() -> None:
    torch.manual_seed(0)
    model = without_dropout(llama()).requires_grad_(False)
    distributed = on_mesh(model, init_device_mesh("cpu", (2, 2), **names("dp", "tp")))
    for block, other in zip(model.model.layers, distributed.model.layers, strict=True):
        size = block.self_attn.q_proj.out_features
        block.self_attn.q_proj = Corrected(block.self_attn.q_proj, 36, size)
        corrected = copy.deepcopy(block.self_attn.q_proj)
        corrected.layer = other.self_attn.q_proj
        other.self_attn.q_proj = corrected
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.01) for m in (model, distributed)]
    for _ in range(2):
        expected, found = gradients(model), gradients(distributed)
        assert expected.keys() == found.keys() and expected
        for optimizer in optimizers:
            optimizer.step()
    logits = model(**batch()).logits
    assert_close(distributed(**batch()).logits, logits)


def test_plain_weights_are_loaded_into_a_distributed_model_and_back() -> None:
    source, target = llama(), on_mesh(llama(), init_device_mesh("cpu", 3, **names("tp")))
    placements = {name: p.placements for name, p in target.named_parameters()}
    target.load_state_dict(source.state_dict())
    assert {name: p.placements for name, p in target.named_parameters()} == placements
    assert_close(target(**batch()).logits, source(**batch()).logits)
    again = llama()
    again.load_state_dict(target.state_dict())
    torch.testing.assert_close(again(**batch()).logits, source(**batch()).logits)
    assert not any(isinstance(p, dtorch.Tensor) for p in again.parameters())


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_activations(reentrant: bool) -> None:
    model = without_dropout(llama())
    distributed = on_mesh(model, init_device_mesh("cpu", 2, **names("tp")))
    for m in (model, distributed):
        m.gradient_checkpointing_enable({"use_reentrant": reentrant})
        m.enable_input_require_grads()
    expected, found = gradients(model), gradients(distributed)
    for name, grad in expected.items():
        assert_close(found[name], grad)
