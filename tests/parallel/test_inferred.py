"""Plans guessed from structure: the plans that models carry are found again, and any guess gives right results."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dtorch import explain, init_device_mesh
from dtorch.parallel import plan_of
from dtorch.parallel.inferred import inferred_styles
from tests.models.zoo import ANY_RULE, MODELS, assert_close, bert, gpt2, llama, on_mesh

pytestmark = ANY_RULE


@pytest.mark.parametrize("options", [{}, {"intermediate_size": 36}], ids=["", "square"])
def test_the_plan_of_a_llama_is_found_again(options: dict) -> None:
    model = llama(**options)
    assert inferred_styles(model) == {row.pattern: row.weights for row in plan_of(model).rows}


def test_query_key_and_value_may_be_one_matrix() -> None:
    assert inferred_styles(gpt2()) == {
        "transformer.wte": "embedding_rowwise",
        "lm_head": "colwise_gather_output",
        "transformer.h.*.attn.c_attn": "colwise_gather_output",
        "transformer.h.*.attn.c_proj": "rowwise",
        "transformer.h.*.mlp.c_fc": "colwise",
        "transformer.h.*.mlp.c_proj": "rowwise",
    }


def test_an_output_projection_may_stand_apart() -> None:
    assert inferred_styles(bert()) == {
        "bert.embeddings.word_embeddings": "embedding_rowwise",
        "cls.predictions.decoder": "colwise_gather_output",
        **dict.fromkeys((f"bert.encoder.layer.*.attention.self.{n}" for n in ("query", "key", "value")), "colwise"),
        "bert.encoder.layer.*.attention.output.dense": "rowwise",
        "bert.encoder.layer.*.intermediate.dense": "colwise",
        "bert.encoder.layer.*.output.dense": "rowwise",
    }


def test_chains_and_encoders_of_torch() -> None:
    chain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 3))
    assert inferred_styles(chain) == {"0": "colwise", "2": "rowwise"}
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    assert inferred_styles(encoder) == {"layers.*.linear1": "colwise", "layers.*.linear2": "rowwise"}
    assert inferred_styles(nn.ModuleList([nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)])) == {"0": "colwise", "2": "rowwise"}


@pytest.mark.parametrize("order", ["qkv", "kvq"])
def test_attention_and_perceptron_in_one_module(order: str) -> None:
    outs = {"q": 4, "k": 2, "v": 2} if order == "qkv" else {"k": 4, "v": 4, "q": 4}
    block = nn.ModuleDict({n: nn.Linear(4, n_out) for n, n_out in outs.items()})
    block.update({"out": nn.Linear(4, 4), "gate": nn.Linear(4, 6), "up": nn.Linear(4, 6), "down": nn.Linear(6, 4)})
    ends = {"out": "rowwise", "down": "rowwise"}
    assert inferred_styles(block) == {**dict.fromkeys((*outs, "gate", "up"), "colwise"), **ends}


def test_what_feeds_nothing_stays_whole() -> None:
    assert inferred_styles(nn.ModuleDict({"a": nn.Linear(4, 6), "b": nn.Linear(5, 4)})) == {}
    assert inferred_styles(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Embedding(9, 4))) == {}


def test_layers_that_differ_have_a_row_each() -> None:
    layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), nn.Sequential(nn.Linear(4, 6), nn.Linear(5, 4))])
    assert inferred_styles(layers) == {"0.0": "colwise", "0.1": "rowwise"}


@pytest.mark.parametrize("name", MODELS)
def test_a_guess_gives_right_results(name: str) -> None:
    model, ids = MODELS[name](), torch.arange(1, 9).view(2, 4)
    distributed = on_mesh(model, init_device_mesh("cpu", 3, mesh_dim_names=("tp",)), inferred_styles(model))
    with torch.no_grad(), explain() as report:
        assert_close(distributed(ids).logits, model(ids).logits)
    assert report.events


def test_a_weight_that_is_computed_is_not_asked_for() -> None:
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 4))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    plan_of(model)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
