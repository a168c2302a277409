"""Weights go onto meshes with every axis and come back bit for bit: from files, from state dicts, before and after use."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import dtorch
from dtorch import init_device_mesh
from tests.models.zoo import ANY_RULE, VOCABULARY, gpt2, mixtral, qwen2_moe, tied_llama, without_dropout

pytestmark = ANY_RULE

MODELS = {"tied_llama": tied_llama, "gpt2": gpt2, "mixtral": mixtral, "qwen2_moe": qwen2_moe}
# Sizes do not divide: 9 and 3 heads, 4 and 5 experts, a vocabulary of 61.
CELLS: dict[str, dict[str, Any]] = {
    "fsdp=2,zero=1": {"fsdp": 2, "zero": 1},
    "fsdp=2,zero=2": {"fsdp": 2, "zero": 2},
    "fsdp=5": {"fsdp": 5},
    "ep=3": {"ep": 3},
    "fsdp=2,tp=2,pp=2": {"fsdp": 2, "tp": 2, "pp": 2},
    "ep=2,tp=3": {"ep": 2, "tp": 3},
    "fsdp=2,ep=2,zero=2": {"fsdp": 2, "ep": 2, "zero": 2},
    "ring_cp=2,ulysses_cp=2": {"ring_cp": 2, "ulysses_cp": 2},
    "tp=3,sp": {"tp": 3, "sp": True},
    "pp=1,virtual_stages=2": {"pp": 1, "virtual_stages": 2},
}
OPTIONS = ("zero", "sp", "virtual_stages")


def mesh_and_options(cell: str) -> tuple[dtorch.DeviceMesh, dict[str, Any]]:
    axes = {name: n for name, n in CELLS[cell].items() if name not in OPTIONS}
    options = {name: n for name, n in CELLS[cell].items() if name in OPTIONS}
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes)), options


def used(model: nn.Module) -> None:
    """A step of training that changes no weight, and one without gradients."""
    ids = torch.randint(1, VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(1))
    without_dropout(model)(input_ids=ids, labels=ids).loss.backward()
    with torch.no_grad():
        model.eval()(input_ids=ids)


def same_state(ours: nn.Module, plain: nn.Module) -> None:
    expected = plain.state_dict()
    found = {name: t.to_torch() for name, t in ours.state_dict().items()}
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], t) and found[name].dtype == t.dtype for name, t in expected.items())


def held(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("name", MODELS)
def test_from_files_and_back(name: str, cell: str, tmp_path: Path) -> None:
    plain, (mesh, options) = MODELS[name](), mesh_and_options(cell)
    plain.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    loaded = dtorch.load_pretrained(type(plain), tmp_path / "theirs", mesh, **options)
    same_state(loaded, plain)
    placed = dtorch.parallelize(copy.deepcopy(plain), mesh, **options)
    assert [p.placements for p in loaded.parameters()] == [p.placements for p in placed.parameters()]
    used(loaded)
    dtorch.save_pretrained(loaded, tmp_path / "ours", max_shard_size="30KB")
    ours, theirs = held(tmp_path / "ours"), held(tmp_path / "theirs")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], t) for n, t in theirs.items())
    again, report = type(plain).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("name", ["tied_llama", "mixtral"])
def test_from_a_state_dict_and_back(name: str, cell: str, assign: bool) -> None:
    plain, other, (mesh, options) = MODELS[name](), MODELS[name](), mesh_and_options(cell)
    ours = dtorch.parallelize(copy.deepcopy(other), mesh, **options)
    places = [p.placements for p in ours.parameters()]
    used(ours)
    ours.load_state_dict(plain.state_dict(), assign=assign)
    same_state(ours, plain)
    assert [p.placements for p in ours.parameters()] == places
    used(ours)
    other.load_state_dict({name: t.to_torch() for name, t in ours.state_dict().items()})
    same_state(ours, other)
    ids = torch.arange(1, 25).view(4, 6)
    with torch.no_grad():
        torch.testing.assert_close(ours(input_ids=ids).logits.to_torch(), plain.eval()(input_ids=ids).logits)
