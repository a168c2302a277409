"""Whole layers of ``torch.nn`` against plain torch, forward and backward, over placements of inputs and parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.sharding.harness import check, values


def layer(
    module: nn.Module, *inputs: torch.Tensor, call: Callable[..., Any] | None = None, limit: int = 8, **options: Any
) -> None:
    """Check a module as a function of its inputs, parameters and buffers."""
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    count = len(inputs)

    def fn(*tensors):
        # Running statistics are written in place, and every run must start from the same ones.
        held = {
            n: t if t.requires_grad or n not in dict(module.named_buffers()) else t.detach().clone()
            for n, t in zip(state, tensors[count:], strict=True)
        }
        held = {n: t.detach().clone() if n in dict(module.named_buffers()) else t for n, t in held.items()}
        out = torch.func.functional_call(module, held, tensors[:count]) if call is None else call(module, held, *tensors[:count])
        return out, [held[n] for n, _ in module.named_buffers()]

    torch.manual_seed(0)
    check(fn, *inputs, *(t.detach().clone() for t in state.values()), grad=True, limit=limit, rtol=1e-4, atol=5e-5, **options)


class Residual(nn.Module):
    """A small block of a residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.short = nn.Conv2d(4, 8, 1, stride=2)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.relu(self.norm(self.first(x)))
        out = F.relu(self.second(out) + self.short(x))
        return self.head(F.adaptive_avg_pool2d(F.max_pool2d(out, 2), 1).flatten(1))


@pytest.fixture(autouse=True)
def _same_weights() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_encoder_layer(norm_first):
    layer(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first), values(3, 5, 8))


def test_transformer_decoder_layer():
    layer(nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True), values(3, 5, 8), values(3, 4, 8, seed=1))


@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention(need_weights):
    module = nn.MultiheadAttention(8, 2, batch_first=True)

    def call(module, held, x):
        return torch.func.functional_call(module, held, (x, x, x), {"need_weights": need_weights})

    layer(module, values(3, 5, 8), call=call)


def test_multihead_attention_with_masks():
    module = nn.MultiheadAttention(8, 2, batch_first=True)
    causal = torch.ones(5, 5).triu(1).bool()
    padding = torch.arange(5) >= torch.tensor([[5], [3], [4]])

    def call(module, held, x, padding):
        return torch.func.functional_call(
            module, held, (x, x, x), {"attn_mask": causal, "key_padding_mask": padding, "need_weights": False}
        )

    layer(module, values(3, 5, 8), padding, call=call)


@pytest.mark.parametrize("training", [True, False])
def test_residual_block(training):
    layer(Residual().train(training), values(4, 4, 8, 8))


def test_dropout_layers_draw_alike():
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.ReLU(), nn.Dropout1d(0.25))

    def call(module, held, x):
        torch.manual_seed(1)
        return torch.func.functional_call(module, held, (x,))

    layer(module, values(3, 5, 8), call=call)


@pytest.mark.parametrize(
    "module",
    [
        nn.LayerNorm(6),
        nn.RMSNorm(6),
        nn.GroupNorm(2, 4),
        nn.BatchNorm1d(4),
        nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
    ],
    ids=lambda m: type(m).__name__,
)
def test_normalisation(module):
    layer(module, values(3, 4, 6), limit=15)


def test_recurrent_layers():
    layer(nn.LSTM(4, 3, batch_first=True), values(2, 3, 4), rule=False, limit=4)
    layer(nn.GRU(4, 3), values(3, 2, 4), rule=False, limit=4)


def test_language_model_head():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(12, 8, padding_idx=0)
            self.norm = nn.RMSNorm(8)
            self.out = nn.Linear(8, 12, bias=False)

        def forward(self, ids, labels):
            logits = self.out(self.norm(self.table(ids)))
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)

    ids = torch.arange(10).view(2, 5) % 12
    labels = (ids + 1).where(ids % 4 != 3, -1)
    layer(Head(), ids, labels, limit=15)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("masked", [False, True])
def test_inference_of_a_transformer(training, masked):
    module = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).train(training)
    names = [n for n, _ in module.named_parameters()]
    options = {"src_key_padding_mask": torch.arange(5) >= torch.tensor([[5], [3], [4]])} if masked else {}

    def fn(x, *weights):
        with torch.inference_mode():
            return torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (x,), options)

    check(fn, values(3, 5, 8), *(p.detach() for p in module.parameters()), limit=6, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("need_weights", [False, True])
def test_inference_of_multihead_attention(need_weights):
    module = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    names = [n for n, _ in module.named_parameters()]

    def fn(x, *weights):
        with torch.no_grad():
            return torch.func.functional_call(
                module, dict(zip(names, weights, strict=True)), (x, x, x), {"need_weights": need_weights}
            )[: 1 + need_weights]

    check(fn, values(3, 5, 8), *(p.detach() for p in module.parameters()), limit=6, rtol=1e-4, atol=1e-5)
