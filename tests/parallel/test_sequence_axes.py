"""Context parallel axes: tokens are split along the sequence, and whatever a model does with them stays right."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dtorch import DeviceMesh, Replicate, Shard, init_device_mesh
from tests.models.zoo import (
    ANY_RULE,
    MODELS,
    PAD,
    VOCABULARY,
    assert_close,
    assert_same_training,
    llama,
    on_mesh,
    without_dropout,
)
from tests.parallel.test_hooks import Catcher

pytestmark = ANY_RULE

MESHES = {
    "ring_cp": (2,),
    "ulysses_cp": (3,),
    "ulysses_cp,ring_cp": (2, 2),
    "dp,ring_cp": (2, 2),
    "tp,ring_cp": (2, 2),
    "pp,ulysses_cp": (2, 2),
    "dp,tp,ring_cp,ulysses_cp": (2, 2, 2, 2),
}


def mesh_of(names: str) -> DeviceMesh:
    return init_device_mesh("cpu", MESHES[names], mesh_dim_names=tuple(names.split(",")))


def tokens(batch: int = 2, length: int = 7) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def seen_by(mesh: DeviceMesh, *args: torch.Tensor, **kwargs: torch.Tensor) -> tuple[tuple, dict]:
    model = on_mesh(Catcher(), mesh)
    model(*args, **kwargs)
    return model.seen


def test_tokens_are_split_along_the_sequence() -> None:
    mask = torch.ones(2, 7, dtype=torch.long)
    (ids,), named = seen_by(
        mesh_of("dp,ring_cp"),
        tokens(),
        attention_mask=mask,
        labels=tokens(),
        position_ids=torch.arange(7)[None],
        inputs_embeds=torch.zeros(2, 7, 3),
        pixels=torch.zeros(2, 7, 4, 4),
        bias=torch.zeros(2, 7),
    )
    both = (Shard(0), Shard(1))
    assert ids.placements == named["labels"].placements == named["inputs_embeds"].placements == both
    assert named["position_ids"].placements == (Replicate(), Shard(1))
    assert {named[n].placements for n in ("attention_mask", "pixels", "bias")} == {(Shard(0), Replicate())}


def test_several_axes_split_it_in_turn_and_a_short_sequence_over_those_it_is_long_enough_for() -> None:
    mesh = mesh_of("ulysses_cp,ring_cp")
    (ids,), _ = seen_by(mesh, tokens(length=7))
    assert [tuple(s.shape) for s in ids.shards] == [(2, 2), (2, 2), (2, 2), (2, 1)]
    (ids,), _ = seen_by(mesh, tokens(length=3))
    assert ids.placements == (Shard(1), Replicate())
    (ids,), _ = seen_by(mesh, tokens(length=1))
    assert type(ids) is torch.Tensor


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_gradients(name: str, mesh: str) -> None:
    model = without_dropout(MODELS[name]())
    distributed, ids = on_mesh(model, mesh_of(mesh)), tokens()
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    labels = ids.masked_fill(mask == 0, -100)
    assert_same_training(distributed, model, input_ids=ids, attention_mask=mask, labels=labels)


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_uneven_and_short_sequences(length: int) -> None:
    model = llama()
    distributed, ids = on_mesh(model, mesh_of("ulysses_cp,ring_cp")), tokens(3, length)
    with torch.no_grad():
        assert_close(distributed(ids).logits, model(ids).logits)
        positions = torch.arange(length)[None] + 2
        expected = model(inputs_embeds=model.model.embed_tokens(ids), position_ids=positions).logits
        embedded = distributed.model.embed_tokens(ids).to_torch()
        assert_close(distributed(inputs_embeds=embedded, position_ids=positions).logits, expected)


@pytest.mark.parametrize("mesh", MESHES)
def test_greedy_generation(mesh: str) -> None:
    model, ids = llama(), tokens()
    options = {"max_new_tokens": 5, "pad_token_id": PAD, "do_sample": False}
    assert torch.equal(on_mesh(model, mesh_of(mesh)).generate(ids, **options).to_torch(), model.generate(ids, **options))


def test_any_module_gives_the_same() -> None:
    model, x = nn.LSTM(5, 4, batch_first=True), torch.randn(2, 7, 5)
    assert_close(on_mesh(model, mesh_of("dp,ring_cp"))(x)[0], model(x)[0])
