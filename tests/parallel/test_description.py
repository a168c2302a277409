"""``describe()``: what a reader is told."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from torch import nn

import dtorch
from dtorch import UsageError, describe, init_device_mesh
from dtorch.parallel.writing import size
from tests.models.zoo import llama, mesh_named, mixtral, on_mesh, tied_llama


def test_mesh_stages_weights_and_ties() -> None:
    text = str(describe(on_mesh(tied_llama(), mesh_named("dp=1,tp=2,pp=2"))))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "LlamaForCausalLM on DeviceMesh('cpu', dp=1, tp=2, pp=2; ids 0, 1, 2, 3), by the model's own plan"
    assert (
        "stage 0 on ids 0, 2: 1 layers, model.layers.0 to model.layers.0; model.embed_tokens, model.rotary_emb, lm_head" in lines
    )
    attention = "model.layers.*.self_attn"
    assert f"{attention}.q_proj.weight 2 of 36x36 tp Shard(0, sizes=(24, 12)) 1.688 KiB to 3.375 KiB 24x36 12x36" in lines
    assert f"{attention}.k_proj.weight 2 of 12x36 tp Shard(0, sizes=(8, 4)) 576 B to 1.125 KiB 8x36 4x36" in lines
    assert "model.norm.weight 36 replicated 144 B" in lines
    assert "lm_head.weight is model.embed_tokens.weight: one parameter, placed once" in lines


def test_repeated_heads_are_remarked() -> None:
    mesh = init_device_mesh("cpu", 4, mesh_dim_names=("tp",))
    text = str(describe(on_mesh(llama(), mesh)))
    assert "3 key/value heads for 4 devices: every device keeps all of those" in text
    assert "self_attn.k_proj.weight" in text and "Shard(0, sizes=(12, 8, 8, 8))" in text


def test_packed_matrices_are_remarked() -> None:
    more_than_experts = init_device_mesh("cpu", (5,), mesh_dim_names=("tp",))
    assert "holds several one after the other" in str(describe(on_mesh(mixtral(), more_than_experts)))
    assert "experts are spread over" in str(describe(on_mesh(mixtral(), mesh_named("tp=2"))))


def test_a_module_that_lies_on_no_mesh_has_nothing_to_tell() -> None:
    with pytest.raises(UsageError, match=r"call dtorch\.parallelize"):
        describe(nn.Linear(2, 2))


def test_without_a_plan() -> None:
    model = dtorch.parallelize(nn.Linear(2, 2), mesh_named("tp=2"))
    assert describe(model).nbytes == {0: 24, 1: 24}
    assert str(describe(model)).splitlines()[0].endswith("by no plan")


def test_bytes_of_each_device_are_those_that_it_holds() -> None:
    mesh = mesh_named("tp=2,pp=2")
    model = on_mesh(tied_llama(), mesh)
    held = dict.fromkeys(mesh.ids, 0)
    for tensor in (*model.parameters(), *model.buffers()):
        for device, shard in zip(tensor.device_mesh.ids, tensor.detach().shards, strict=True):
            held[device] += shard.nbytes
    told = describe(model)
    assert told.nbytes == held
    assert f"{size(held[0])} on 0" in str(told).splitlines()[-3]


def test_html_tells_the_same() -> None:
    told = describe(on_mesh(tied_llama(), mesh_named("dp=1,tp=2,pp=2")))
    page = ElementTree.fromstring(told._repr_html_())
    text = " ".join(part for part in page.itertext())
    for weights in told.weights:
        assert weights.name in text and weights.how in text
    assert "stage 1 on ids 1, 3" in text and "one parameter, placed once" in text
    assert len(page.findall("table")) == 2 and len(page.findall(".//rect")) == 4


def test_many_pieces_are_not_all_told() -> None:
    mesh = init_device_mesh("cpu", (2, 11), mesh_dim_names=("dp", "tp"))
    text = str(describe(dtorch.parallelize(nn.Linear(12, 12), mesh, {"weight": "colwise"})))
    assert "2x12 1x12 1x12 1x12 1x12 1x12 1x12 1x12 and 3 more" in text
    assert "bytes per device: 144 B on 0, 11, 96 B on 1-10, 12-21" in text


@pytest.mark.parametrize(("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 30, "5 GiB")])
def test_bytes_have_units(nbytes: int, text: str) -> None:
    assert size(nbytes) == text
