"""What is found in files, and what is said of files that are not there, damaged or of another kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dtorch import UsageError
from dtorch.parallel.weights import problem
from dtorch.parallel.weights.files import INDEX, SINGLE, stored_in

TENSORS = {"a": torch.ones(2, 3), "b": torch.tensor(1, dtype=torch.int64), "c": torch.zeros(0, 2, dtype=torch.bfloat16)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / SINGLE)
    return tmp_path


def indexed(folder: Path, weights: object) -> Path:
    (folder / SINGLE).rename(folder / "one.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weights}))
    return folder


def refused(path: Path, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        stored_in(path)
    assert "rule:" in str(caught.value) and "to do:" in str(caught.value)


def test_headers(folder: Path) -> None:
    for path in (folder, folder / SINGLE, Path(str(folder) + "/")):
        found = stored_in(path)
        assert {n: (s.shape, s.dtype) for n, s in found.items()} == {n: (tuple(t.shape), t.dtype) for n, t in TENSORS.items()}
        assert all(Path(s.file).is_absolute() and s.name == n for n, s in found.items())


def test_several_files(folder: Path) -> None:
    weights = {"a": "one.safetensors", "b": "two.safetensors"}
    indexed(folder, weights)
    save_file({"b": torch.ones(4), "a": torch.ones(1)}, folder / "two.safetensors")
    for path in (folder, folder / INDEX):
        found = stored_in(path)
        assert {n: (Path(s.file).name, s.shape) for n, s in found.items()} == {
            "a": ("one.safetensors", (2, 3)),
            "b": ("two.safetensors", (4,)),
        }


def test_nothing_there(tmp_path: Path) -> None:
    refused(tmp_path / "no", "does not exist")
    refused(tmp_path, f"without {SINGLE}")
    (tmp_path / "pytorch_model.bin").touch()
    refused(tmp_path, "it holds pytorch_model.bin")


def test_damaged(folder: Path) -> None:
    whole = (folder / SINGLE).read_bytes()
    for content in (whole[:-1], whole + b"x", whole[:20], b"", b"a text that is no header"):
        (folder / SINGLE).write_bytes(content)
        refused(folder, "cannot be read")


def test_an_index_that_is_wrong(folder: Path) -> None:
    refused(indexed(folder, {"a": "one.safetensors", "z": "two.safetensors"}), "two.safetensors are not there")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors", "z": "one.safetensors"}}))
    refused(folder, "names z in one.safetensors, where that is not")
    for text in ("{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": null}'):
        (folder / INDEX).write_text(text)
        refused(folder, "index .* cannot be read")


def test_a_dtype_that_pytorch_lacks(folder: Path) -> None:
    data = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(data.replace(b'"dtype":"I64"', b'"dtype":"ZZZ"'))
    refused(folder, "cannot be read|dtype ZZZ")


def test_a_package_that_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"no package dtorch_none.*\n.*\n.*\n.*dtorch\[hf\]"):
        problem.package("dtorch_none")
