"""The models: small ones with random weights, of shapes that do not divide, and a real one where its weights are at hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn

from ...core.errors import UsageError
from ...demo.model import load_model, weights_file

VOCABULARY = 61
PAD = 0
IMAGE = 8

FOR_LOSS = ("labels", "output_router_logits")
"""Inputs that only a loss needs."""

Inputs = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Subject:
    """A model of the zoo.

    Attributes:
        make: builds it, in evaluation mode, always with the same weights.
        inputs: what it is given for a number of samples and of tokens, with labels and what else only a loss needs.
        layers: how many it has, so that more stages are refused.
        generates: whether it has ``generate``.
    """

    make: Callable[[], Any]
    inputs: Callable[[int, int], Inputs]
    layers: int
    generates: bool = True


def tokens(batch: int, length: int) -> Inputs:
    """Sequences of random tokens, the first padded on the left."""
    ids = torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


def routed_tokens(batch: int, length: int) -> Inputs:
    """The same for a model with experts, whose loss is also of how they are chosen."""
    return {**tokens(batch, length), "output_router_logits": True}


def images(batch: int, length: int) -> Inputs:
    """Random images, each with a class; the length has no meaning."""
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(batch, 3, IMAGE, IMAGE, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 5, (batch,), generator=generator)}


def _random(kind: str, config: str, **options: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(transformers, kind)(getattr(transformers, config)(initializer_range=SPREAD, **options)).eval()


def _decoder(hidden: int, layers: int, heads: int, key_values: int, inner: int) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": inner, "vocab_size": VOCABULARY}
    return {**sizes, "num_attention_heads": heads, "num_key_value_heads": key_values}


def _encoder(hidden: int, layers: int, heads: int, inner: int) -> dict[str, Any]:
    return {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": inner}


def _real() -> Any:
    """In float64: for this one PyTorch's kernels in float32 are themselves off by 1e-4, in gradients of few tokens."""
    model = load_model().model.double()
    model.loss_function = _next_token_loss
    return model


def _next_token_loss(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    """What the model computes itself, but not in float32."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def be_quiet() -> None:
    """Keep transformers from telling of the configurations of these models, in this process."""
    transformers.logging.set_verbosity_error()


def missing(name: str) -> str:
    """Why a model cannot be built here; empty where it can."""
    try:
        if name == REAL:
            weights_file()
    except UsageError as error:
        return str(error)
    return ""


SPREAD = 0.2
"""Of random weights: wide enough for attention and experts to choose, so that a wrong choice is seen."""

REAL = "smollm2"

_GPT2 = {"n_embd": 24, "n_layer": 3, "n_head": 3, "vocab_size": VOCABULARY, "n_positions": 64}
_BERT = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, **_encoder(24, 4, 3, 50)}
_MIXTRAL = {"num_local_experts": 4, **_decoder(24, 3, 6, 2, 20)}
_VIT = {"image_size": IMAGE, "patch_size": 2, "num_labels": 5, **_encoder(20, 2, 5, 30)}
_QWEN_MOE = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 14,
    **_decoder(24, 3, 4, 4, 30),
}

MODELS = {
    "llama": Subject(partial(_random, "LlamaForCausalLM", "LlamaConfig", **_decoder(36, 3, 9, 3, 50)), tokens, 3),
    "gpt2": Subject(partial(_random, "GPT2LMHeadModel", "GPT2Config", **_GPT2), tokens, 3),
    "bert": Subject(partial(_random, "BertForMaskedLM", "BertConfig", **_BERT), tokens, 4, generates=False),
    "mixtral": Subject(partial(_random, "MixtralForCausalLM", "MixtralConfig", **_MIXTRAL), routed_tokens, 3),
    "vit": Subject(partial(_random, "ViTForImageClassification", "ViTConfig", **_VIT), images, 2, generates=False),
    "qwen_moe": Subject(partial(_random, "Qwen2MoeForCausalLM", "Qwen2MoeConfig", **_QWEN_MOE), routed_tokens, 3),
    REAL: Subject(_real, tokens, 30),
}
