"""Heads are never cut, and queries stay with their keys."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from dtorch.parallel.heads import Heads, head_sizes, heads_at
from tests.models.zoo import bert, llama


@pytest.mark.parametrize(
    ("heads", "devices", "query", "key_value"),
    [
        (Heads(9, 3), 2, (6, 3), (2, 1)),
        (Heads(9, 9), 2, (5, 4), (5, 4)),
        (Heads(9, 3), 3, (3, 3, 3), (1, 1, 1)),
        (Heads(8, 2), 4, (2, 2, 2, 2), None),
        (Heads(8, 2), 3, (3, 3, 2), None),
        (Heads(3, 3), 4, (1, 1, 1, 0), None),
        (Heads(4, 1), 1, (4,), (1,)),
    ],
)
def test_split(heads: Heads, devices: int, query: tuple[int, ...], key_value: tuple[int, ...] | None) -> None:
    assert heads.split(devices) == (query, key_value)


@pytest.mark.parametrize(
    ("name", "length", "sizes"),
    [
        ("layers.0.self_attn.q_proj.weight", 9 * 64, (384, 192)),
        ("layers.0.self_attn.k_proj.weight", 3 * 64, (128, 64)),
        ("layers.0.self_attn.v_proj.bias", 3 * 64, (128, 64)),
        ("layers.0.self_attn.o_proj.weight", 9 * 64, (384, 192)),
        ("layers.0.self_attn.sinks", 9, (6, 3)),
        ("layers.0.self_attn.odd.weight", 10, (5, 5)),
    ],
)
def test_sizes_in_elements(name: str, length: int, sizes: tuple[int, ...]) -> None:
    assert head_sizes(Heads(9, 3), name, length, 2) == sizes


def test_few_keys_and_values_stay_whole() -> None:
    assert head_sizes(Heads(8, 2), "attn.k_proj.weight", 16, 4) is None
    assert head_sizes(Heads(8, 2), "attn.q_proj.weight", 64, 4) == (16, 16, 16, 16)


def test_heads_are_found_in_the_model() -> None:
    modules = dict(llama().named_modules())
    assert heads_at("model.layers.1.self_attn.q_proj", modules) == Heads(9, 3)
    assert heads_at("model.layers.1.mlp.gate_proj", modules) is None
    assert heads_at("lm_head", modules) is None


def test_an_output_kept_apart_belongs_to_attention() -> None:
    modules = dict(bert().named_modules())
    assert heads_at("bert.encoder.layer.0.attention.self.query", modules) == Heads(3, 3)
    assert heads_at("bert.encoder.layer.0.attention.output.dense", modules) == Heads(3, 3)
    assert heads_at("bert.encoder.layer.0.output.dense", modules) is None


def test_own_attention_without_config() -> None:
    block = nn.Module()
    block.num_heads, block.num_kv_heads, block.wq = 6, 4, nn.Linear(2, 2)
    model = nn.ModuleDict({"attn": block})
    assert heads_at("attn.wq", dict(model.named_modules())) is None, "six query heads do not group over four"
    block.num_kv_heads = 2
    assert heads_at("attn.wq", dict(model.named_modules())) == Heads(6, 2)
    del block.num_kv_heads
    block.config = SimpleNamespace(num_key_value_heads=3)
    assert heads_at("attn.wq", dict(model.named_modules())) == Heads(6, 3)
