"""Small models with random weights, and the meshes they are tried on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import dtorch
from dtorch import DeviceMesh, init_device_mesh

VOCABULARY = 61
PAD = 0

# Whether an operator runs replicated for want of a rule is no matter of what a model answers.
ANY_RULE = pytest.mark.filterwarnings("ignore:.*has no sharding rule:RuntimeWarning")

MESHES = {
    "tp=2": ((2,), ("tp",)),
    "tp=3": ((3,), ("tp",)),
    "dp=2,tp=2": ((2, 2), ("dp", "tp")),
    "tp=2,pp=2": ((2, 2), ("tp", "pp")),
    "dp=1,tp=2,pp=2": ((1, 2, 2), ("dp", "tp", "pp")),
}


def mesh_named(name: str) -> DeviceMesh:
    """A mesh of ``MESHES``."""
    shape, names = MESHES[name]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def llama(**options: Any) -> nn.Module:
    """Nine query and three key/value heads, as in SmolLM2."""
    sizes = {
        "hidden_size": 36,
        "intermediate_size": 50,
        "num_hidden_layers": 2,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **{**sizes, **options})).eval()


def tied_llama() -> nn.Module:
    """Embedding and output layer share one weight."""
    return llama(tie_word_embeddings=True)


def gpt2(**options: Any) -> nn.Module:
    """Query, key and value in one transposed matrix, tied embeddings."""
    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 3}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=64, **{**sizes, **options})).eval()


def phi3(**options: Any) -> nn.Module:
    """Query, key and value in one matrix, gate and up in another."""
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3}
    tokens = {"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2}
    return Phi3ForCausalLM(Phi3Config(vocab_size=VOCABULARY, intermediate_size=50, **{**sizes, **tokens, **options})).eval()


def bert(**options: Any) -> nn.Module:
    """An encoder whose output layer shares a weight and a bias."""
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 50}
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **{**sizes, **options})).eval()


def mixtral(**options: Any) -> nn.Module:
    """Experts, chosen by the data."""
    sizes = {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "intermediate_size": 20,
    }
    return MixtralForCausalLM(MixtralConfig(vocab_size=VOCABULARY, num_local_experts=4, **{**sizes, **options})).eval()


QWEN_SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "intermediate_size": 28,
    "moe_intermediate_size": 20,
    "num_experts": 5,
    "num_experts_per_tok": 2,
}


def qwen2_moe(**options: Any) -> nn.Module:
    """Five experts, and one that all tokens share."""
    sizes = {**QWEN_SIZES, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1, **options}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(vocab_size=VOCABULARY, **sizes)).eval()


def qwen3_moe() -> nn.Module:
    """Five experts."""
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=VOCABULARY, head_dim=8, **QWEN_SIZES)).eval()


LANGUAGE_MODELS: dict[str, Callable[[], nn.Module]] = {"llama": llama, "tied_llama": tied_llama, "gpt2": gpt2, "mixtral": mixtral}
MODELS = {**LANGUAGE_MODELS, "bert": bert, "phi3": phi3}


def batch() -> dict[str, torch.Tensor]:
    """Two sequences of seven tokens, the first padded on the left: ids and mask, (2, 7)."""
    ids = torch.randint(1, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    return {"input_ids": ids, "attention_mask": mask}


def on_mesh(model: nn.Module, mesh: DeviceMesh, plan: Any = None) -> nn.Module:
    """A copy of a model, distributed."""
    return dtorch.parallelize(copy.deepcopy(model), mesh, plan)


def without_dropout(model: nn.Module) -> nn.Module:
    """The model in training mode, but the same at every call."""
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return model.train()


def assert_close(actual: dtorch.Tensor, expected: torch.Tensor) -> None:
    """Equal within 1e-5 of the largest value."""
    error = (actual.detach().to_torch() - expected.detach()).abs().max()
    assert error <= 1e-5 * expected.abs().max(), f"off by {error}"


def assert_same_training(distributed: Any, model: Any, **inputs: Any) -> None:
    """Equal outputs and loss, and gradients that lie as their parameters do, within 1e-4 of the largest value."""
    expected, out = model(**inputs), distributed(**inputs)
    assert_close(out.logits, expected.logits)
    assert_close(out.loss, expected.loss)
    expected.loss.backward()
    out.loss.backward()
    for (where, a), b in zip(distributed.named_parameters(), model.parameters(), strict=True):
        if b.grad is not None:
            assert a.grad.placements == a.placements, where
            assert (a.grad.to_torch() - b.grad).abs().max() <= 1e-4 * max(b.grad.abs().max(), 1e-3), where
