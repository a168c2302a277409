"""SmolLM2 with real weights: nine query and three key/value heads on meshes that do not divide them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Shard, init_device_mesh
from dtorch.demo.model import HEADS, LAYERS, Loaded
from tests.models.zoo import ANY_RULE, on_mesh

pytestmark = ANY_RULE

QUESTION = "What is the capital of France?"
TOKENS = 8


@pytest.fixture(scope="module")
def split(smollm2: Loaded) -> Loaded:
    """The model over two stages of two devices."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "tp", "pp"))
    return Loaded(on_mesh(smollm2.model, mesh), smollm2.tokenizer)


def answer(loaded: Loaded, question: str = QUESTION, **options: object) -> torch.Tensor:
    torch.manual_seed(7)
    out = loaded.model.generate(**loaded.encode(question), max_new_tokens=TOKENS, **options)
    return out.to_torch() if isinstance(out, dtorch.Tensor) else out


def test_what_the_demo_knows_beforehand(smollm2: Loaded) -> None:
    assert (smollm2.model.config.num_hidden_layers, smollm2.model.config.num_attention_heads) == (LAYERS, HEADS)


def test_one_device_is_bit_identical(smollm2: Loaded) -> None:
    inputs = smollm2.encode(QUESTION)
    with torch.no_grad():
        expected = smollm2.model(**inputs).logits
        out = on_mesh(smollm2.model, DeviceMesh("cpu"))(**inputs).logits
    assert torch.equal(out.to_torch(), expected)


def test_heads_are_split_whole(split: Loaded) -> None:
    attention = split.model.model.layers[0].self_attn
    assert attention.q_proj.weight.placements[1] == Shard(0, (6 * 64, 3 * 64))
    assert attention.k_proj.weight.placements[1] == Shard(0, (2 * 64, 1 * 64))
    assert attention.o_proj.weight.placements[1] == Shard(1, (6 * 64, 3 * 64))
    assert split.model.lm_head.weight is split.model.model.embed_tokens.weight


def test_logits(smollm2: Loaded, split: Loaded) -> None:
    inputs = smollm2.encode(QUESTION)
    with torch.no_grad():
        expected, out = smollm2.model(**inputs).logits, split.model(**inputs).logits.to_torch()
    assert (out - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_greedy_answer(smollm2: Loaded, split: Loaded) -> None:
    expected = answer(smollm2, do_sample=False)
    assert "Paris" in smollm2.tokenizer.decode(expected[0])
    assert torch.equal(answer(split, do_sample=False), expected)


def test_sampled_answer(smollm2: Loaded, split: Loaded) -> None:
    options = {"do_sample": True, "top_k": 40, "temperature": 1.2}
    assert torch.equal(answer(split, "Tell me a story.", **options), answer(smollm2, "Tell me a story.", **options))


def test_attention_gathers_nothing(split: Loaded) -> None:
    with torch.no_grad(), dtorch.explain() as report:
        split.model(**split.encode(QUESTION))
    seen = Counter((e.comm.axis if e.comm.kind != "transfer" else "pp", e.comm.kind) for e in report.events)
    # Sums after attention and perceptron of each layer and after the embedding; the logits; hidden states, cosines and
    # sines to the second stage, and what the output layer needs back to the first, where its weight is.
    assert seen == {("tp", "all_reduce"): 2 * LAYERS + 1, ("tp", "all_gather"): 1, ("pp", "transfer"): 4}
    assert report.replicated == {}
