"""``generate()`` with the key/value cache: the tokens of plain PyTorch, greedy and sampled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import TextStreamer

import dtorch
from dtorch import DeviceMesh, init_device_mesh
from tests.models.zoo import ANY_RULE, LANGUAGE_MODELS, MESHES, PAD, batch, llama, mesh_named, on_mesh

pytestmark = ANY_RULE

GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.8}


def tokens(model: nn.Module, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    torch.manual_seed(5)
    out = model.generate(**inputs, max_new_tokens=8, pad_token_id=PAD, **options)
    return out.to_torch() if isinstance(out, dtorch.Tensor) else out


def first_row(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: v[1:] for k, v in inputs.items()}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_greedy(name: str, mesh: str) -> None:
    model, inputs = LANGUAGE_MODELS[name](), batch()
    assert torch.equal(tokens(on_mesh(model, mesh_named(mesh)), inputs, **GREEDY), tokens(model, inputs, **GREEDY))


@pytest.mark.parametrize("mesh", MESHES)
def test_sampled(mesh: str) -> None:
    model, inputs = llama(), batch()
    assert torch.equal(tokens(on_mesh(model, mesh_named(mesh)), inputs, **SAMPLED), tokens(model, inputs, **SAMPLED))


@pytest.mark.parametrize("devices", [3, 4, 8])
def test_fewer_key_value_heads_than_devices(devices: int) -> None:
    model, inputs = llama(hidden_size=32, num_attention_heads=8, num_key_value_heads=2), batch()
    distributed = on_mesh(model, init_device_mesh("cpu", devices, mesh_dim_names=("tp",)))
    assert torch.equal(tokens(distributed, inputs, **GREEDY), tokens(model, inputs, **GREEDY))


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_batch_of_one(options: dict[str, Any]) -> None:
    model, inputs = llama(), first_row(batch())
    for mesh in (DeviceMesh("cpu"), mesh_named("dp=1,tp=2,pp=2"), mesh_named("dp=2,tp=2")):
        assert torch.equal(tokens(on_mesh(model, mesh), inputs, **options), tokens(model, inputs, **options))


def test_without_cache() -> None:
    model, inputs = llama(), batch()
    distributed = on_mesh(model, mesh_named("tp=2,pp=2"))
    assert torch.equal(tokens(distributed, inputs, use_cache=False, **GREEDY), tokens(model, inputs, use_cache=False, **GREEDY))


def test_scores_are_returned() -> None:
    model, inputs = llama(), first_row(batch())
    options = {"max_new_tokens": 3, "output_scores": True, "return_dict_in_generate": True, "pad_token_id": PAD, **GREEDY}
    expected, out = model.generate(**inputs, **options), on_mesh(model, mesh_named("tp=2")).generate(**inputs, **options)
    for a, b in zip(out.scores, expected.scores, strict=True):
        torch.testing.assert_close(a.to_torch(), b, atol=1e-5, rtol=1e-5)


class _Letters:
    """Stands for a tokenizer: each token is a letter."""

    def decode(self, ids: Any, **options: Any) -> str:
        return "".join(chr(ord("a") + int(i) % 26) for i in (ids if isinstance(ids, list) else [ids]))


def test_a_text_streamer_of_transformers_takes_our_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    model, inputs = llama(), first_row(batch())
    tokens(model, inputs, streamer=TextStreamer(_Letters(), skip_prompt=True), **GREEDY)
    expected = capsys.readouterr().out
    tokens(on_mesh(model, mesh_named("tp=2,pp=2")), inputs, streamer=TextStreamer(_Letters(), skip_prompt=True), **GREEDY)
    assert capsys.readouterr().out == expected != ""


BEAMS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3, "do_sample": False},
    "several of them": {"num_beams": 4, "num_return_sequences": 2, "early_stopping": True, "do_sample": False},
    "sampled": {"num_beams": 2, **SAMPLED},
}


@pytest.mark.parametrize("options", BEAMS.values(), ids=BEAMS)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_beam_search(name: str, mesh: str, options: dict[str, Any]) -> None:
    model, inputs = LANGUAGE_MODELS[name](), batch()
    assert torch.equal(tokens(on_mesh(model, mesh_named(mesh)), inputs, **options), tokens(model, inputs, **options))


@pytest.mark.parametrize("stage", [0, 1, None], ids=["first stage", "last stage", "whole mesh"])
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_global_ids_on_any_mesh_of_the_model(name: str, stage: int | None) -> None:
    model, inputs, mesh = LANGUAGE_MODELS[name](), batch(), mesh_named("tp=2,pp=2")
    home = mesh if stage is None else mesh.unbind("pp")[stage]
    placed = {k: dtorch.Tensor(v, device_mesh=home) for k, v in inputs.items()}
    assert torch.equal(tokens(on_mesh(model, mesh), placed, **GREEDY), tokens(model, inputs, **GREEDY))
