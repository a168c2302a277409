"""What whole models move: no more than their parallelism needs, as ``explain()`` reports it."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn

import dtorch
from dtorch import explain, init_device_mesh
from tests.models.zoo import ANY_RULE, VOCABULARY, bert, gpt2, llama, mixtral, phi3, qwen2_moe, qwen3_moe, without_dropout

pytestmark = ANY_RULE

LAYERS = 2


def tokens(batch: int = 2, length: int = 17) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def distributed(names: str, shape: tuple[int, ...], heads: tuple[int, int] = (9, 3), **options: int) -> nn.Module:
    query, key_value = heads
    sizes = {"hidden_size": query * 8, "num_attention_heads": query, "num_key_value_heads": key_value}
    model = llama(**sizes, num_hidden_layers=LAYERS, intermediate_size=100)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple(names.split(",")))
    return dtorch.parallelize(without_dropout(copy.deepcopy(model)), mesh, **options)


def of_layers(model: nn.Module, ids: torch.Tensor) -> Counter[str]:
    """Kinds of collectives of the layers in a forward pass: between the embedding and the last norm."""
    marks: list[int] = []
    with explain() as report:
        handles = [
            part.register_forward_hook(lambda *_: marks.append(len(report.events)))
            for part in (model.model.embed_tokens, model.model.norm)
        ]
        model(ids)
    for handle in handles:
        handle.remove()
    return Counter(event.comm.kind for event in report.events[marks[0] : marks[1]])


@pytest.mark.parametrize("length", [1, 4, 17, 100])
@pytest.mark.parametrize("names", ["tp", "dp,tp", "tp,pp"])
def test_a_tensor_parallel_layer_adds_up_twice(names: str, length: int) -> None:
    kinds = of_layers(distributed(names, (2, 2)[: len(names.split(","))]), tokens(length=length))
    kinds.pop("transfer", None)
    assert kinds == {"all_reduce": 2 * LAYERS}


@pytest.mark.parametrize("devices", [2, 3, 4, 5])
@pytest.mark.parametrize("heads", [(9, 3), (4, 2), (3, 1), (2, 2)])
@pytest.mark.parametrize("training", [False, True])
def test_heads_that_do_not_divide_move_no_more(heads: tuple[int, int], devices: int, training: bool) -> None:
    model = distributed("tp", (devices,), heads)
    with torch.set_grad_enabled(training):
        assert of_layers(model, tokens()) == {"all_reduce": 2 * LAYERS}


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_with_sp_it_scatters_and_gathers_twice(devices: int) -> None:
    model, ids = distributed("tp", (devices,), sp=True), tokens()
    assert of_layers(model, ids) == {"all_gather": 2 * LAYERS, "reduce_scatter": 2 * LAYERS}
    assert of_layers(model, tokens(length=1)) == {"all_reduce": 2 * LAYERS}


BLOCKS = {
    "bert": (lambda: bert(num_attention_heads=4), "bert.encoder.layer"),
    "mixtral": (mixtral, "model.layers"),
    "qwen2_moe": (lambda: qwen2_moe(shared_expert_intermediate_size=40), "model.layers"),
    "qwen3_moe": (qwen3_moe, "model.layers"),
}


def of_blocks(model: nn.Module, layers: str, ids: torch.Tensor) -> Counter[str]:
    """Kinds of collectives of all layers in a forward pass."""
    marks: list[int] = []
    blocks = model.get_submodule(layers)
    with explain() as report:
        handles = [
            blocks[0].register_forward_pre_hook(lambda *_: marks.append(len(report.events)), prepend=True),
            blocks[-1].register_forward_hook(lambda *_: marks.append(len(report.events))),
        ]
        model(input_ids=ids)
    for handle in handles:
        handle.remove()
    return Counter(event.comm.kind for event in report.events[marks[0] : marks[1]])


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("name", BLOCKS)
def test_biases_and_experts_move_no_more(name: str, devices: int, training: bool) -> None:
    make, layers = BLOCKS[name]
    mesh = init_device_mesh("cpu", (devices,), mesh_dim_names=("tp",))
    with torch.set_grad_enabled(training):
        whole, split = (dtorch.parallelize(without_dropout(make()), mesh, sp=sp) for sp in (False, True))
        assert of_blocks(whole, layers, tokens()) == {"all_reduce": 2 * LAYERS}
        assert of_blocks(split, layers, tokens()) == {"all_gather": 2 * LAYERS, "reduce_scatter": 2 * LAYERS}


PACKED = {"gpt2": (lambda: gpt2(n_head=6), "transformer.h", 3), "phi3": (phi3, "model.layers", 5)}
"""Models that hold query, key and value in one matrix, or gate and up, and how many parts these have in a layer."""


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("name", PACKED)
def test_parts_of_one_matrix_meet_their_partners_in_training_and_are_gathered_outside(name: str, devices: int) -> None:
    make, layers, parts = PACKED[name]
    mesh = init_device_mesh("cpu", (devices,), mesh_dim_names=("tp",))
    model = dtorch.parallelize(without_dropout(make()), mesh)
    found = of_blocks(model, layers, tokens())
    assert found.pop("all_to_all") <= parts * LAYERS and found == {"all_reduce": 2 * LAYERS}
    with torch.no_grad():
        gathered = {"gpt2": 1, "phi3": 2}[name]
        few = tokens(length=4)
        assert of_blocks(model, layers, few) == {"all_reduce": 2 * LAYERS, "all_gather": gathered * LAYERS}


def test_with_sp_backward_does_the_same_the_other_way_round() -> None:
    model, ids = distributed("tp", (2,), sp=True), tokens()
    loss = model(ids, labels=ids).loss
    with explain() as report:
        loss.backward()
    kinds = Counter(event.comm.kind for event in report.events)
    # One more scatter before the output layer, one more gather after the embedding; sums of norms' and tokens' gradients.
    assert (kinds["reduce_scatter"], kinds["all_gather"]) == (2 * LAYERS + 1, 2 * LAYERS + 1)


@pytest.mark.parametrize("names", ["tp", "dp,tp"])
def test_a_loss_over_a_split_vocabulary_gathers_no_logits(names: str) -> None:
    model, ids = distributed(names, (2, 2)[: len(names.split(","))]), tokens()
    model.model.norm.register_forward_hook(lambda *_: begin.append(len(report.events)))
    begin: list[int] = []
    with explain() as report:
        loss = model(ids, labels=ids).loss
    events = report.events[begin[0] :]
    assert {event.comm.kind for event in events} == {"all_reduce"}
    # One number for each token at most, where its logits are VOCABULARY numbers.
    assert sum(event.comm.nbytes for event in events) <= 4 * 4 * 2 * ids.numel()
    with explain() as report:
        loss.backward()
    assert {event.comm.kind for event in report.events if event.comm.axis == "tp"} == {"all_reduce"}


def test_data_parallel_forward_moves_nothing() -> None:
    for training in (False, True):
        with explain() as report, torch.set_grad_enabled(training):
            distributed("dp", (2,))(tokens(3))
        assert not report.events


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("names", ["fsdp", "fsdp,pp"])
def test_of_fsdp_each_micro_batch_costs_what_a_batch_does_and_zero_2_gathers_once(names: str, schedule: str) -> None:
    found: dict[tuple[int, int], Counter[str]] = {}
    ids = tokens(8, 64)
    for zero in (2, 3):
        for count in (1, 4):
            model = distributed(names, (2, 2)[: len(names.split(","))], zero=zero)
            with explain() as report:
                dtorch.pipeline(model, count, schedule).step(input_ids=ids, labels=ids)
            found[zero, count] = Counter(e.comm.kind for e in report.events if e.comm.axis == "fsdp")
    # A block is a layer; what is outside of layers is one a stage. The last stage's is gathered for forward and backward.
    assert found[3, 1]["all_gather"] >= 2 * LAYERS + 1
    assert found[3, 4] == {kind: 4 * n for kind, n in found[3, 1].items()}
    assert found[2, 4]["all_gather"] == found[2, 1]["all_gather"] == found[2, 1]["reduce_scatter"]
    assert found[2, 4]["reduce_scatter"] == 4 * found[2, 1]["reduce_scatter"]
