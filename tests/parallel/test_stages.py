"""Layers to stages, and everything else to where it is used."""

from __future__ import annotations

import pytest
from torch import nn

import dtorch
from dtorch import UsageError, init_device_mesh
from dtorch.parallel.stages import assign_layers_to_stages, assign_stages, find_layers
from tests.models.zoo import bert, gpt2, llama, tied_llama


def test_earlier_stages_take_the_extra_layers() -> None:
    stages = assign_stages(llama(num_hidden_layers=7), 3)
    assert [len(stages.layers_of(s)) for s in range(3)] == [3, 2, 2]
    assert stages.layers_of(1) == ["model.layers.3", "model.layers.4"]


def test_what_stands_outside_of_the_layers() -> None:
    of = assign_stages(llama(num_hidden_layers=3), 3).of
    assert (of["model.embed_tokens"], of["model.norm"], of["lm_head"]) == (0, 2, 2)
    assert of["model.rotary_emb"] == 0, "it has no parameters, and its input is on the first stage"
    assert of["model.layers.1.mlp.up_proj"] == 1


def test_a_tied_module_joins_the_first() -> None:
    of = assign_stages(tied_llama(), 2).of
    assert of["lm_head"] == of["model.embed_tokens"] == 0
    of = assign_stages(bert(), 2).of
    assert of["cls.predictions.decoder"] == of["cls.predictions"] == 0, "the decoder's weight and bias are both tied"
    assert of["cls.predictions.transform.dense"] == 1


def test_layers_are_found_without_a_plan() -> None:
    assert find_layers(gpt2()) == ["transformer.h.0", "transformer.h.1"]
    assert find_layers(bert()) == ["bert.encoder.layer.0", "bert.encoder.layer.1"]
    assert find_layers(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == ["0", "1", "2"]


def test_a_module_without_a_list_has_its_children_as_layers() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.act, self.second = nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)

    assert find_layers(Net()) == ["first", "second"]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(UsageError, match=r"(?s)3 pipeline stages for 2 layers.*make pp at most 2"):
        assign_stages(llama(), 3)


def test_one_stage_needs_no_layers() -> None:
    assert set(assign_stages(nn.Linear(2, 2), 1).of.values()) == {0}


def test_too_many_stages_are_refused_before_anything_is_moved() -> None:
    model, mesh = llama(), init_device_mesh("cpu", (2, 3), mesh_dim_names=("tp", "pp"))
    before, client = dict(model.named_parameters()), dtorch.session()
    counts = client.calls, client.planned
    with pytest.raises(UsageError, match=r"(?s)3 pipeline stages for 2 layers.*make pp at most 2"):
        dtorch.parallelize(model, mesh)
    assert all(before[name] is p for name, p in model.named_parameters())
    assert (client.calls, client.planned) == counts


def test_layers_are_assigned_to_whatever_stands_for_stages() -> None:
    assert assign_layers_to_stages(7, range(3)) == [0, 0, 0, 1, 1, 2, 2]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    first, second = mesh.unbind("pp")
    assert assign_layers_to_stages(3, [first, second]) == [first, first, second]
    assert assign_layers_to_stages(4, mesh.unbind("pp") * 2) == [first, second] * 2, "interleaved"
    assert assign_layers_to_stages(2, mesh.unbind("no such axis")) == [mesh, mesh]
    assert dtorch.nn.assign_layers_to_stages is assign_layers_to_stages


@pytest.mark.parametrize(("layers", "stages"), [(2, 3), (0, 1)])
def test_a_stage_without_a_layer_is_refused(layers: int, stages: int) -> None:
    with pytest.raises(UsageError, match=f"{stages} pipeline stages for {layers} layers"):
        assign_layers_to_stages(layers, range(stages))


@pytest.mark.parametrize("stages", [2, init_device_mesh("cpu", 2, mesh_dim_names="pp")], ids=str)
def test_what_is_no_sequence_of_stages_is_refused(stages: object) -> None:
    with pytest.raises(UsageError, match=r"mesh\.unbind"):
        assign_layers_to_stages(4, stages)


def test_no_stage_at_all_is_refused() -> None:
    with pytest.raises(UsageError, match="give a layer and a stage"):
        assign_layers_to_stages(2, [])
