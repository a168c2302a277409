"""``describe()``: what a reader is told."""

from __future__ import annotations

import pytest
from torch import nn

import dtorch
from dtorch import UsageError, init_device_mesh
from dtorch.parallel import describe
from tests.models.zoo import llama, mesh_named, mixtral, on_mesh, tied_llama


def test_mesh_stages_weights_and_ties() -> None:
    text = describe(on_mesh(tied_llama(), mesh_named("dp=1,tp=2,pp=2")))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "LlamaForCausalLM on DeviceMesh('cpu', dp=1, tp=2, pp=2; ids 0, 1, 2, 3), by the model's own plan"
    assert (
        "stage 0 on ids 0, 2: 1 layers, model.layers.0 to model.layers.0; model.embed_tokens, model.rotary_emb, lm_head" in lines
    )
    assert "model.layers.*.self_attn.q_proj.weight 2 of 36x36 tp Shard(0, sizes=(24, 12)) 24x36 12x36" in lines
    assert "model.layers.*.self_attn.k_proj.weight 2 of 12x36 tp Shard(0, sizes=(8, 4)) 8x36 4x36" in lines
    assert "model.norm.weight 36 replicated" in lines
    assert "lm_head.weight is model.embed_tokens.weight: one parameter, placed once" in lines


def test_repeated_heads_are_remarked() -> None:
    mesh = init_device_mesh("cpu", 4, mesh_dim_names=("tp",))
    text = describe(on_mesh(llama(), mesh))
    assert "3 key/value heads for 4 devices: every device keeps all of those" in text
    assert "self_attn.k_proj.weight" in text and "Shard(0, sizes=(12, 8, 8, 8))" in text


def test_packed_matrices_are_remarked() -> None:
    assert "holds several one after the other" in describe(on_mesh(mixtral(), mesh_named("tp=2")))


def test_a_module_that_lies_on_no_mesh_has_nothing_to_tell() -> None:
    with pytest.raises(UsageError, match=r"call dtorch\.parallelize"):
        describe(nn.Linear(2, 2))


def test_without_a_plan() -> None:
    model = dtorch.parallelize(nn.Linear(2, 2), mesh_named("tp=2"))
    assert describe(model).splitlines()[0].endswith("by no plan")
