"""What safetensors files hold: names, shapes and dtypes, read from their headers alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ...core.errors import UsageError
from .problem import package, problem

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

FORMAT = "weights are safetensors files, as save_pretrained writes them"


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file."""

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def stored_in(path: Path) -> dict[str, Stored]:
    """Every tensor of a model's files by name, without reading any.

    Args:
        path: a folder with ``model.safetensors`` or an index of several files, or one of these files.

    Raises:
        UsageError: there is no such file, or one is damaged or of another format.
    """
    home = weights_file(path)
    if home.suffix == ".json":
        return _by_index(home)
    return _header(home)


def weights_file(path: Path) -> Path:
    """The file that a path means: itself, or what its folder holds.

    Raises:
        UsageError: there is none.
    """
    if path.is_file():
        return path.absolute()
    found = [path / name for name in (SINGLE, INDEX) if (path / name).is_file()]
    if found:
        return found[0].absolute()
    if not path.exists():
        raise problem(f"path {str(path)!r}, which does not exist", FORMAT, "give the folder that save_pretrained wrote")
    others = sorted(p.name for p in path.iterdir() if p.suffix in (".safetensors", ".bin", ".gguf", ".pt", ".pth"))
    given = f"folder {str(path)!r} without {SINGLE} and {INDEX}" + (f"; it holds {', '.join(others)}" if others else "")
    remedy = "give one .safetensors file by its path; other formats load with transformers, then dtorch.save_pretrained"
    raise problem(given, FORMAT, remedy)


def _by_index(index: Path) -> dict[str, Stored]:
    """The tensors that an index lists, each where it says."""
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        by_name = {str(name): str(file) for name, file in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        given = f"index {str(index)!r} that cannot be read ({type(error).__name__}: {error})"
        raise problem(given, 'an index is a JSON file with a "weight_map" of names to files', "fetch or save it anew") from error
    files = {file: index.parent / file for file in dict.fromkeys(by_name.values())}
    gone = [file for file, place in files.items() if not place.is_file()]
    if gone:
        given = f"index {str(index)!r}, of whose {len(files)} files {', '.join(gone)} are not there"
        raise problem(given, "every file that an index names lies beside it", "fetch the rest, or save the model anew")
    headers = {file: _header(place) for file, place in files.items()}
    _check_listed(index, by_name, headers)
    return {name: headers[file][name] for name, file in by_name.items()}


def _check_listed(index: Path, by_name: Mapping[str, str], headers: Mapping[str, Mapping[str, Stored]]) -> None:
    absent = [f"{name} in {file}" for name, file in by_name.items() if name not in headers[file]]
    if absent:
        given = f"index {str(index)!r} that names {', '.join(absent)}, where that is not"
        raise problem(given, "files hold what their index says", "files and index are of one save; fetch them together")


def _header(file: Path) -> dict[str, Stored]:
    safetensors = package("safetensors")
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (it is no dict)
            return {name: _stored(file, name, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    except (OSError, safetensors.SafetensorError) as error:
        given = f"file {str(file)!r} that cannot be read ({error})"
        remedy = "fetch or save it anew; other formats load with transformers, then dtorch.save_pretrained"
        raise problem(given, f"{FORMAT}, and whole", remedy) from error


def _stored(file: Path, name: str, shape: tuple[int, ...], dtype: str) -> Stored:
    if dtype not in DTYPES:
        raise unknown_dtype(f"{name} of dtype {dtype} in {str(file)!r}")
    return Stored(str(file), name, shape, DTYPES[dtype])


def unknown_dtype(given: str) -> UsageError:
    """The error for a dtype that safetensors files or PyTorch lack."""
    return problem(given, f"weights are of {', '.join(DTYPES)}", "convert it with the package that made it")


DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
