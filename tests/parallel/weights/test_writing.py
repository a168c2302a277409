"""Files written one tensor at a time are those that safetensors reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from dtorch import UsageError
from dtorch.parallel.weights.files import DTYPES
from dtorch.parallel.weights.writing import Entry, divide, in_bytes, index_of, write

SHAPES = [(), (0, 3), (5,), (2, 3)]


def made(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(0, 2, shape).to(dtype)


def entries(tensors: dict[str, torch.Tensor]) -> list[Entry]:
    return [Entry(name, tuple(t.shape), t.dtype) for name, t in tensors.items()]


def test_every_dtype_and_shape(tmp_path: Path) -> None:
    tensors = {f"{name} {shape}": made(dtype, shape) for name, dtype in DTYPES.items() for shape in SHAPES}
    asked, written = [], []

    def value(name: str) -> torch.Tensor:
        asked.append(name)
        return tensors[name]

    write(tmp_path / "w", entries(tensors), value, written.append)
    back = load_file(tmp_path / "w")
    assert back.keys() == tensors.keys() == set(asked)
    for name, expected in tensors.items():
        assert back[name].dtype == expected.dtype and back[name].shape == expected.shape
        assert torch.equal(back[name].reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)), name
    assert sum(written) == sum(t.nbytes for t in tensors.values())
    with safe_open(tmp_path / "w", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_what_does_not_lie_row_major_is_written_so(tmp_path: Path) -> None:
    tensor = torch.randn(4, 3).t()
    write(tmp_path / "w", entries({"t": tensor}), lambda name: tensor, lambda nbytes: None)
    assert torch.equal(load_file(tmp_path / "w")["t"], tensor)


def test_a_dtype_that_files_lack(tmp_path: Path) -> None:
    tensor = torch.zeros(2, dtype=torch.complex128)
    with pytest.raises(UsageError, match=r"t of dtype torch\.complex128"):
        write(tmp_path / "w", entries({"t": tensor}), lambda name: tensor, lambda nbytes: None)


def test_division() -> None:
    parts = [Entry(name, (n,), torch.float32) for name, n in (("a", 2), ("b", 1), ("c", 9), ("d", 1))]
    assert divide(parts, 10**6) == {"model.safetensors": parts}
    files = divide(parts, 12)
    assert [[e.name for e in f] for f in files.values()] == [["a", "b"], ["c"], ["d"]], "one that is larger is alone"
    assert list(files) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    index = index_of(files)
    assert index["metadata"] == {"total_parameters": 13, "total_size": 52}
    one, two, three = files
    assert index["weight_map"] == {"a": one, "b": one, "c": two, "d": three}
    assert divide([], 5) == {"model.safetensors": []}


@pytest.mark.parametrize(("size", "nbytes"), [(7, 7), ("5GB", 5 * 10**9), ("2 MiB", 2 << 20), ("20kb", 20_000)])
def test_sizes(size: int | str, nbytes: int) -> None:
    assert in_bytes(size) == nbytes


@pytest.mark.parametrize("size", [0, -1, "5", "GB", "1.5GB", "0KB", "5XB", True, ""])
def test_sizes_that_are_none(size: int | str) -> None:
    with pytest.raises(UsageError, match="max_shard_size"):
        in_bytes(size)
