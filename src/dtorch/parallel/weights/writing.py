"""Writing safetensors files one tensor at a time: the header says beforehand where each will lie."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...core.raw import as_bytes
from .files import DTYPES, INDEX, SINGLE, unknown_dtype
from .problem import SAVE, problem

NAMES = {dtype: name for name, dtype in DTYPES.items()}

ALIGNMENT = 8
"""The data begins at a multiple of this many bytes, as the format asks."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor that will be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        return math.prod(self.shape) * self.dtype.itemsize


def divide(entries: Sequence[Entry], limit: int) -> dict[str, list[Entry]]:
    """Files by name, each of at most ``limit`` bytes unless one tensor is larger: entries in order, as many as fit."""
    files: list[list[Entry]] = [[]]
    nbytes = 0
    for entry in entries:
        if files[-1] and nbytes + entry.nbytes > limit:
            files.append([])
            nbytes = 0
        files[-1].append(entry)
        nbytes += entry.nbytes
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {f"model-{number:05}-of-{len(files):05}.safetensors": file for number, file in enumerate(files, 1)}


def index_of(files: Mapping[str, Sequence[Entry]]) -> dict[str, object]:
    """What the index of several files says."""
    entries = [entry for file in files.values() for entry in file]
    total = {"total_parameters": sum(math.prod(e.shape) for e in entries), "total_size": sum(e.nbytes for e in entries)}
    weights = {entry.name: name for name, file in files.items() for entry in file}
    return {"metadata": total, "weight_map": dict(sorted(weights.items()))}


def write_index(folder: Path, files: Mapping[str, Sequence[Entry]]) -> None:
    """Write the index of several files."""
    (folder / INDEX).write_text(json.dumps(index_of(files), indent=2) + "\n", encoding="utf-8")


def write(file: Path, entries: Sequence[Entry], value: Callable[[str], torch.Tensor], written: Callable[[int], object]) -> None:
    """Write a file.

    Args:
        entries: what it will hold.
        value: the tensor of a name, asked for when its turn comes and let go of at once.
        written: told the bytes of each tensor when it is written.
    """
    # The widest first, so that every tensor begins at a multiple of its element size.
    ordered = sorted(entries, key=lambda e: (-e.dtype.itemsize, e.name))
    with file.open("wb") as out:
        out.write(_header(ordered))
        for entry in ordered:
            out.write(_bytes(value(entry.name)))
            written(entry.nbytes)


def _header(entries: Sequence[Entry]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for entry in entries:
        if entry.dtype not in NAMES:
            raise unknown_dtype(f"{entry.name} of dtype {entry.dtype}")
        offsets = [at, at + entry.nbytes]
        header[entry.name] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
        at += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _bytes(tensor: torch.Tensor) -> Any:
    """A tensor's memory, row-major, as what a file takes."""
    return as_bytes(tensor.resolve_conj().resolve_neg().contiguous()).numpy()


def in_bytes(size: int | str) -> int:
    """A size as a number of bytes: an int, or text such as ``"5GB"`` or ``"500MiB"``.

    Raises:
        UsageError: it is neither.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    text = str(size).strip().upper()
    unit = next((u for u in UNITS if text.endswith(u)), "")
    number = text.removesuffix(unit).strip()
    if not unit or not number.isdigit() or int(number) == 0:
        rule = f"a size is a number of bytes, or a whole number and one of {', '.join(UNITS)}"
        raise problem(f"max_shard_size={size!r}", rule, 'write e.g. "5GB"', SAVE)
    return int(number) * UNITS[unit]


UNITS = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
