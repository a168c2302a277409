"""Architectures with names, ties and layouts of their own: in files, on a mesh, and in files again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import dtorch
from dtorch import init_device_mesh
from tests.models.test_pretrained import assert_same, held
from tests.models.zoo import ANY_RULE

pytestmark = ANY_RULE

DECODER = {
    "vocab_size": 50,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
}
ENCODER = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
TWO_SIDES = {"d_model": 24, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 10}
WAVES = {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}


def config(kind: str, **options: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, kind)(**options)


# Model class -> its configuration, and what is odd about it.
CASES: dict[str, Callable[[], Any]] = {
    # one table under four names
    "T5ForConditionalGeneration": config("T5Config", vocab_size=50, d_model=24, d_kv=6, d_ff=32, num_layers=2, num_heads=4),
    # positions that are a computed parameter
    "WhisperForConditionalGeneration": config(
        "WhisperConfig", vocab_size=50, num_mel_bins=8, max_source_positions=16, max_target_positions=16, **TWO_SIDES, **TOKENS
    ),
    # a parametrized weight, in files by its older names
    "Wav2Vec2ForCTC": config(
        "Wav2Vec2Config", vocab_size=20, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, **ENCODER, **WAVES
    ),
    # two rotary embeddings, a scaled table
    "Gemma3ForCausalLM": config("Gemma3TextConfig", head_dim=6, **DECODER),
    # experts from the second layer on, a buffer that files hold
    "DeepseekV3ForCausalLM": config("DeepseekV3Config", first_k_dense_replace=1, **DECODER, **LATENT, **ROUTED),
    # experts that are one stack in files too
    "GptOssForCausalLM": config("GptOssConfig", head_dim=6, num_local_experts=4, num_experts_per_tok=2, **DECODER),
    # statistics of batches
    "ResNetForImageClassification": config("ResNetConfig", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3),
    # a model within a model, renamed both ways
    "LlavaForConditionalGeneration": lambda: transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(image_size=8, patch_size=4, **ENCODER),
        text_config=transformers.LlamaConfig(**DECODER),
        image_token_index=49,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    kind = getattr(transformers, name)
    kind(CASES[name]()).save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    expected = kind.from_pretrained(tmp_path / "theirs")
    loaded = dtorch.load_pretrained(kind, tmp_path / "theirs", init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp")))
    assert_same(loaded, expected)
    dtorch.save_pretrained(loaded, tmp_path / "ours", max_shard_size="30KB")
    ours, theirs = held(tmp_path / "ours"), held(tmp_path / "theirs")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], t) for n, t in theirs.items())
    assert_same(kind.from_pretrained(tmp_path / "ours"), expected)
