"""The Llama of ``examples``: logits and gradients of transformers on any mesh, and no more communication than there must be."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import dtorch
from dtorch import Replicate, Shard, UsageError, explain, init_device_mesh
from examples.llama import Llama
from examples.llama.__main__ import TINY, main, mesh_of
from examples.llama.compare import compare, distributed
from tests.models.zoo import ANY_RULE

pytestmark = ANY_RULE

MESHES = [
    "dp=3",
    "tp=2",
    "tp=5,pp=2",
    "fsdp=2,tp=2,pp=3",
    "dp=2,tp=2,pp=2",
    "ring_cp=3",
    "ulysses_cp=2,tp=2",
    "ring_cp=2,ulysses_cp=2,tp=2",
    "tp=2,ring_cp=2",
    "ep=2,fsdp=2,tp=3",
    "fsdp=2,ep=1,tp=2",
    "pp=3,dp=1,ring_cp=2,tp=1",
    "dp=2,fsdp=2,tp=2,pp=2,ring_cp=2,ulysses_cp=2",
    "tp=12",
]


def plain(**options: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**{**TINY, **options}))


def tokens(batch: int = 3, length: int = 11) -> torch.Tensor:
    return torch.randint(0, TINY["vocab_size"], (batch, length))


@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("mesh", MESHES)
def test_logits_and_gradients(mesh: str, sp: bool) -> None:
    model = plain(tie_word_embeddings=sp)
    found = compare(model, distributed(model, mesh_of(mesh), sp), tokens())
    assert found.right, "\n".join(found.lines())


@pytest.mark.parametrize(
    "options",
    [
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 9},
        {"attention_bias": True, "mlp_bias": True},
        {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10},
        {"tie_word_embeddings": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("mesh", ["fsdp=2,tp=2,pp=2", "tp=4"])
def test_other_shapes(mesh: str, options: dict[str, Any]) -> None:
    model = plain(**options)
    found = compare(model, distributed(model, mesh_of(mesh)), tokens())
    assert found.right, "\n".join(found.lines())


@pytest.mark.parametrize("zero", [1, 2])
def test_lesser_forms_of_fsdp(zero: int) -> None:
    model = plain()
    ours = distributed(model, mesh_of("dp=2,fsdp=2,tp=2"), zero=zero)
    for _ in range(2):
        assert compare(model, ours, tokens()).right


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 5), (2, 2)])
def test_less_to_split_than_devices(batch: int, length: int) -> None:
    model = plain()
    ids = tokens(batch, length)
    ours = distributed(model, mesh_of("dp=3,ring_cp=3,tp=2"), sp=True)
    with torch.no_grad():
        logits, expected = ours(ids), model(ids).logits
    torch.testing.assert_close(logits.to_torch(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def of_layers(names: str, shape: tuple[int, ...], sp: bool) -> Counter[str]:
    """Collectives of the layers in a forward pass: between the embedding and the last norm."""
    model = distributed(plain(), init_device_mesh("cpu", shape, mesh_dim_names=tuple(names.split(","))), sp)
    marks: list[int] = []
    with explain() as report:
        for part in (model.model.embed_tokens, model.model.norm):
            part.register_forward_hook(lambda *_: marks.append(len(report.events)))
        model(tokens(4, 17))
    return Counter(event.comm.kind for event in report.events[marks[0] : marks[1]])


@pytest.mark.parametrize(("names", "shape"), [("tp", (2,)), ("tp", (5,)), ("dp,tp", (2, 3)), ("tp,pp", (2, 3))])
def test_a_layer_adds_up_twice_or_scatters_and_gathers_twice(names: str, shape: tuple[int, ...]) -> None:
    layers = TINY["num_hidden_layers"]
    kinds = of_layers(names, shape, sp=False)
    kinds.pop("transfer", None)
    assert kinds == {"all_reduce": 2 * layers}
    kinds = of_layers(names, shape, sp=True)
    kinds.pop("transfer", None)
    # The last norm gathers for the output layer, too.
    assert kinds == {"reduce_scatter": 2 * layers, "all_gather": 2 * layers + 1}


@pytest.mark.parametrize("sp", [False, True])
def test_backward_moves_as_much_as_forward(sp: bool) -> None:
    model = distributed(plain(), init_device_mesh("cpu", 2, mesh_dim_names=("tp",)), sp)
    loss = model.loss(tokens(2, 17))
    with explain() as report:
        loss.backward()
    # Sums of norms' gradients, and of the loss, are far smaller.
    tensors = [event.comm.kind for event in report.events if event.comm.nbytes >= 2 * 17 * TINY["hidden_size"]]
    regions = 2 * TINY["num_hidden_layers"] + 1
    assert Counter(tensors) == ({"reduce_scatter": regions, "all_gather": regions} if sp else {"all_reduce": regions})


def test_neither_dp_forward_nor_the_loss_gathers_anything() -> None:
    with explain() as report, torch.no_grad():
        distributed(plain(), init_device_mesh("cpu", 2, mesh_dim_names=("dp",)))(tokens(4))
    assert not report.events
    model = distributed(plain(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    with explain() as report:
        model.loss(tokens(4))
    assert {event.comm.kind for event in report.events} == {"all_reduce"}


def test_where_weights_lie() -> None:
    model = distributed(plain(), mesh_of("tp=2,pp=2"))
    attention = model.model.layers[2].self_attn
    assert attention.q_proj.weight.placements == (Shard(0, (48, 24)),)
    assert attention.k_proj.weight.placements == (Shard(0, (16, 8)),)
    assert attention.o_proj.weight.placements == (Shard(1, (48, 24)),)
    assert attention.q_proj.weight.device_mesh.ids == model.lm_head.weight.device_mesh.ids == (1, 3)
    assert [layer.mlp.up_proj.weight.device_mesh.ids[0] for layer in model.model.layers] == [0, 0, 1]
    wide = distributed(plain(), mesh_of("tp=12")).model.layers[0].self_attn
    assert wide.k_proj.weight.placements == (Replicate(),)
    assert [wide.q_proj.weight.local_shape((d,))[0] for d in range(12)] == [8] * 9 + [0] * 3


def test_it_trains_as_on_one_device() -> None:
    model = plain()
    ours, ids = distributed(model, mesh_of("fsdp=2,tp=2,pp=2"), sp=True), tokens(4)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (ours, model)]
    losses: list[list[float]] = [[], []]
    for _ in range(3):
        for m, optimizer, seen in zip((ours, model), optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss = ours.loss(ids) if m is ours else model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][2] < losses[0][0]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match=r"(?s)4 pipeline stages for 3 layers.*make pp at most 3"):
        distributed(plain(), mesh_of("pp=4"))
    with pytest.raises(ValueError, match="plain rotary"):
        distributed(plain(hidden_act="gelu"), mesh_of("tp=2"))


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--mesh", "dp=2,tp=2", "--batch", "2", "--length", "5", "--sp", "--tied"]) == 0
    out = capsys.readouterr().out
    assert "dp=2, tp=2" in out and "logits: largest error" in out and "7 reduce_scatter" in out
    assert main(["--mesh", "pp=4"]) == 2
    assert "make pp at most 3" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--mesh", "dp:2"])
    assert "is not axis=devices" in capsys.readouterr().err


def test_without_fully_shard_numbers_are_the_same() -> None:
    """Gradients of what ``torch.nn`` made stay partial then, which is for the optimizer to add up."""
    model, ids = plain(), tokens()
    ours = Llama(model.config, mesh_of("dp=2,tp=2"))
    ours.load_state_dict(model.state_dict())
    assert compare(model, ours, ids).right
    norm = ours.model.layers[0].input_layernorm.weight
    assert isinstance(norm, dtorch.Tensor) and norm.grad.placements[0] == dtorch.Partial()
