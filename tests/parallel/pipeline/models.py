"""Models and batches for pipelines, and the comparison with one pass of plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import dtorch
from dtorch import DeviceMesh, init_device_mesh
from tests.models.zoo import VOCABULARY, llama, without_dropout

# (devices, schedule, stages on each device)
CELLS = [(p, name, v) for p in (2, 3, 4) for name, v in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2))]
ROWS = 8


def staged(devices: int) -> DeviceMesh:
    """A pipeline of so many devices."""
    return init_device_mesh("cpu", devices, mesh_dim_names=("pp",))


def sequential(layers: int = 8) -> nn.Module:
    """Layers of one size, each a module with a nonlinearity, the batch in dim 0."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(layers)))


def tied() -> nn.Module:
    """A Llama of eight layers whose head is its embedding."""
    return without_dropout(llama(num_hidden_layers=8, tie_word_embeddings=True))


def gpt2() -> nn.Module:
    """A GPT-2 of eight layers; embeddings are tied."""
    config = GPT2Config(
        n_embd=24, n_layer=8, n_head=3, vocab_size=VOCABULARY, n_positions=64, bos_token_id=None, eos_token_id=None
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return without_dropout(model)


LANGUAGE_MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: without_dropout(llama(num_hidden_layers=8)),
    "tied_llama": tied,
    "gpt2": gpt2,
}


def text(rows: int = ROWS) -> dict[str, torch.Tensor]:
    """Sequences of five tokens, one padded, with labels of which an uneven part is left out."""
    ids = torch.randint(1, VOCABULARY, (rows, 5), generator=torch.Generator().manual_seed(1))
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[0, :2] = 0
    labels[0, :3] = -100
    labels[rows // 2, 2:] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def on(mesh: DeviceMesh, model: nn.Module, stages: int = 1) -> nn.Module:
    """A copy of a model on a mesh."""
    return dtorch.parallelize(copy.deepcopy(model), mesh, virtual_stages=stages)


def plain(t: Any) -> torch.Tensor:
    """A value as a plain tensor."""
    return t.to_torch() if isinstance(t, dtorch.Tensor) else t.detach()


def assert_same_gradients(model: nn.Module, expected: nn.Module) -> None:
    """Every gradient within 1e-4 of the largest of its kind, and lying as its parameter does."""
    for (name, a), b in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if b.grad is not None:
            assert a.grad.device_mesh is a.device_mesh and a.grad.placements == a.placements, name
            error = (plain(a.grad) - b.grad).abs().max()
            assert error <= 1e-4 * b.grad.abs().max().clamp_min(1e-6), f"{name} is off by {error}"


def mean_square(output: Any, target: torch.Tensor) -> torch.Tensor:
    """A loss that is a mean over rows."""
    return ((output - target) ** 2).mean()
