"""Saving a distributed model: refused with a way out, and the way out works in both directions."""

from __future__ import annotations

import io
import pathlib
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn

from dtorch import UsageError, init_device_mesh
from tests.models.zoo import ANY_RULE, LANGUAGE_MODELS, MESHES, llama, mesh_named, on_mesh

pytestmark = ANY_RULE

Save = Callable[[nn.Module, pathlib.Path], object]
REFUSED: dict[str, Save] = {
    "save_pretrained": lambda model, place: model.save_pretrained(place),
    "safetensors": lambda model, place: save_file(model.state_dict(), place / "weights"),
    "safetensors of a model": lambda model, place: save_model(model, str(place / "weights")),
    "a state dict": lambda model, place: torch.save(model.state_dict(), io.BytesIO()),
    "a model": lambda model, place: torch.save(model, io.BytesIO()),
}


def read(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.to_torch() for name, t in model.state_dict().items()}


@pytest.mark.parametrize("axis", ["tp", "pp", "fsdp", "ring_cp"])
@pytest.mark.parametrize("save", REFUSED.values(), ids=REFUSED)
def test_saving_what_lies_on_a_mesh_is_refused_with_a_way_out(save: Save, axis: str, tmp_path: pathlib.Path) -> None:
    model = on_mesh(llama(), init_device_mesh("cpu", 2, mesh_dim_names=(axis,)))
    with pytest.raises(UsageError, match=r"to do: .*t\.to_torch\(\) for name, t in model\.state_dict\(\)"):
        save(model, tmp_path)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_save_pretrained_of_what_was_read(name: str, mesh: str, tmp_path: pathlib.Path) -> None:
    model = LANGUAGE_MODELS[name]()
    distributed = on_mesh(model, mesh_named(mesh))
    distributed.save_pretrained(tmp_path, state_dict=read(distributed))
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.config.to_diff_dict() == {
        **model.config.to_diff_dict(),
        "dtype": "float32",
        "architectures": [type(model).__name__],
    }
    for key, expected in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], expected), key
    again = on_mesh(loaded, mesh_named("dp=2,tp=2"))
    assert all(torch.equal(read(again)[key], expected) for key, expected in model.state_dict().items())


@pytest.mark.parametrize("mesh", MESHES)
def test_a_state_dict_goes_out_and_into_a_model_on_another_mesh(mesh: str, tmp_path: pathlib.Path) -> None:
    source, target = on_mesh(llama(), mesh_named(mesh)), on_mesh(llama(), mesh_named("tp=3"))
    torch.save(read(source), tmp_path / "weights.pt")
    save_file(read(source), tmp_path / "weights.safetensors")
    for saved in (torch.load(tmp_path / "weights.pt"), load_file(tmp_path / "weights.safetensors")):
        target.load_state_dict(saved)
        assert all(torch.equal(a, b) for a, b in zip(read(target).values(), read(source).values(), strict=True))
        nn.init.zeros_(target.lm_head.weight)
    assert target.lm_head.weight.device_mesh is mesh_named("tp=3")
