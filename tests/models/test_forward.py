"""Logits of whole models: bit for bit on one device, within 1e-5 on meshes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dtorch
from dtorch import DeviceMesh, Shard
from tests.models.zoo import ANY_RULE, MESHES, MODELS, assert_close, batch, llama, mesh_named, on_mesh

pytestmark = ANY_RULE


def logits(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize("name", MODELS)
def test_one_device_is_bit_identical(name: str) -> None:
    model, inputs = MODELS[name](), batch()
    distributed = on_mesh(model, DeviceMesh("cpu"))
    assert torch.equal(logits(distributed, inputs).to_torch(), logits(model, inputs))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_meshes(name: str, mesh: str) -> None:
    model, inputs = MODELS[name](), batch()
    out = logits(on_mesh(model, mesh_named(mesh)), inputs)
    assert isinstance(out, dtorch.Tensor)
    assert_close(out, logits(model, inputs))


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2", "tp=2,pp=2"])
def test_eager_attention(mesh: str) -> None:
    model, inputs = llama(attn_implementation="eager"), batch()
    assert_close(logits(on_mesh(model, mesh_named(mesh)), inputs), logits(model, inputs))


@pytest.mark.parametrize("kind", ["no_grad", "inference_mode", "autocast"])
def test_contexts(kind: str) -> None:
    model, inputs = llama(), batch()
    distributed = on_mesh(model, mesh_named("tp=2,pp=2"))
    contexts = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    }
    with contexts[kind]():
        expected, out = model(**inputs).logits.detach(), distributed(**inputs).logits.detach()
    tolerance = 2e-2 if kind == "autocast" else 1e-5
    torch.testing.assert_close(out.to_torch(), expected, atol=tolerance * expected.abs().max().item(), rtol=0)


def test_one_sequence_is_not_split_over_dp() -> None:
    model, inputs = llama(), {k: v[:1] for k, v in batch().items()}
    assert_close(logits(on_mesh(model, mesh_named("dp=2,tp=2")), inputs), logits(model, inputs))


def test_an_uneven_batch_is_split_over_dp() -> None:
    model, inputs = llama(), {k: torch.cat([v, v[:1]]) for k, v in batch().items()}
    assert_close(logits(on_mesh(model, mesh_named("dp=2,tp=2")), inputs), logits(model, inputs))


def test_hidden_states_of_every_stage() -> None:
    model, inputs = llama(num_hidden_layers=3), batch()
    distributed = on_mesh(model, mesh_named("tp=2,pp=2"))
    with torch.no_grad():
        expected = model(**inputs, output_hidden_states=True).hidden_states
        out = distributed(**inputs, output_hidden_states=True).hidden_states
    assert len(out) == len(expected) == 4
    for a, b in zip(out, expected, strict=True):
        assert_close(a, b)


def test_encoder_of_torch_with_a_plan() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 7, 16)
    plan = {"*.linear1": "colwise", "*.linear2": "rowwise"}
    for mesh in MESHES:
        assert_close(on_mesh(model, mesh_named(mesh), plan)(x), model(x))


def test_perceptron_with_placements() -> None:
    model, x = nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 5)), torch.randn(4, 16)
    plan = {"0.*": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}}
    for mesh in MESHES:
        assert_close(on_mesh(model, mesh_named(mesh), plan)(x), model(x))
    out = on_mesh(model, mesh_named("dp=2,tp=2"), plan)(x)
    assert out.placements[0] == Shard(0)
