"""``save_pretrained`` of plain modules: what is written, when, and what is left when it fails."""

from __future__ import annotations

import copy
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dtorch import UsageError, load_pretrained, parallelize, save_pretrained
from dtorch.parallel.weights import save as save_module
from tests.parallel.test_states import MESHES, Model, on, values
from tests.parallel.weights.test_load import mesh_named, on_meta


def held(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}


def expected(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t for name, t in model.state_dict().items() if name != "out.weight"}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("size", ["1GB", 200, 1])
def test_every_mesh_writes_what_one_device_would(tmp_path: Path, mesh: str, size: int | str) -> None:
    model = Model()
    save_pretrained(on(model, mesh), tmp_path, max_shard_size=size)
    found = held(tmp_path)
    assert found.keys() == expected(model).keys(), "tied weights are written once"
    assert all(torch.equal(found[name], t) for name, t in expected(model).items())
    files = sorted(file.name for file in tmp_path.iterdir())
    assert (files == ["model.safetensors"]) == (size == "1GB")
    if size == 1:
        assert len(files) == len(found) + 1 and "model.safetensors.index.json" in files
    again = on_meta()
    load_pretrained(again, tmp_path, mesh_named("tp=3"), {"first": "colwise"}, strict=False)
    assert all(torch.equal(values(again.state_dict())[name], t) for name, t in expected(model).items())


def test_a_module_on_no_mesh(tmp_path: Path) -> None:
    model = Model().half()
    save_pretrained(model, tmp_path / "new" / "folder")
    found = held(tmp_path / "new" / "folder")
    assert all(torch.equal(found[name], t) and found[name].dtype == t.dtype for name, t in expected(model).items())


def test_one_weight_at_a_time_is_brought_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, alive = on(Model(), "tp=2"), []
    plain = save_module._plain

    def noting(tensor: torch.Tensor) -> torch.Tensor:
        out = plain(tensor)
        assert not [t for t in alive if t() is not None], "the one before is let go of"
        alive[:] = [weakref.ref(out)]
        return out

    monkeypatch.setattr(save_module, "_plain", noting)
    save_pretrained(model, tmp_path)
    assert held(tmp_path).keys() == expected(model).keys()


def test_a_second_save_takes_the_place_of_the_first(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    for size in (100, "1GB", 150, 100):
        model = Model()
        save_pretrained(model, tmp_path, max_shard_size=size)
        found = held(tmp_path)
        assert found.keys() == expected(model).keys()
        assert all(torch.equal(found[name], t) for name, t in expected(model).items())
        assert (tmp_path / "model.safetensors.index.json").exists() == (size != "1GB")
    assert (tmp_path / "mine.txt").read_text() == "kept"


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Model()
    save_pretrained(first, tmp_path)
    before = sorted(os.listdir(tmp_path))

    def failing(tensor: torch.Tensor) -> torch.Tensor:
        raise OSError("the disk is full")

    monkeypatch.setattr(save_module, "_plain", failing)
    with pytest.raises(OSError, match="the disk is full"):
        save_pretrained(Model(), tmp_path, max_shard_size=100)
    assert sorted(os.listdir(tmp_path)) == before
    assert all(torch.equal(held(tmp_path)[name], t) for name, t in expected(first).items())


class Odd(nn.Linear):
    """A state that is no tensor."""

    def get_extra_state(self) -> Any:
        """A dict."""
        return {"steps": 3}


def test_what_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="which is a file"):
        save_pretrained(Model(), tmp_path / "file")
    with pytest.raises(UsageError, match="max_shard_size='big'"):
        save_pretrained(Model(), tmp_path, max_shard_size="big")
    with pytest.raises(UsageError, match="_extra_state of Odd"):
        save_pretrained(Odd(2, 2), tmp_path)
    assert os.listdir(tmp_path) == ["file"]


def test_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = parallelize(copy.deepcopy(Model()), mesh_named("tp=2"), {})
    save_pretrained(model, tmp_path)
    assert capsys.readouterr().err == ""
    save_pretrained(model, tmp_path, progress=True)
    assert "saving weights" in capsys.readouterr().err
