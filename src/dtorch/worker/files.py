"""Reading pieces of values from safetensors files: of each tensor only the boxes that are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.grid import Grid, Here
from ..core.program import Filled, Load, Read

Open = Callable[[int], Any]
"""From the number of a stored tensor to what gives its slices."""


def filled(instruction: Load, here: Here, device_of: Callable[[str], torch.device]) -> dict[int, tuple[Tensor, ...]]:
    """The pieces of every value that a worker holds, by handle; each file is opened once, and closed at the end."""
    with ExitStack() as stack:
        opened: dict[int, Any] = {}
        slices = partial(_slices, instruction, opened, stack)
        made = {v.handle: _pieces(v, here, slices, device_of(v.mesh.device_type)) for v in instruction.values}
        return {handle: pieces for handle, pieces in made.items() if pieces}


def _slices(instruction: Load, opened: dict[int, Any], stack: ExitStack, source: int) -> Any:
    # Only who loads weights needs the package.
    from safetensors import safe_open

    number, name = instruction.tensors[source]
    if number not in opened:
        opened[number] = stack.enter_context(safe_open(instruction.files[number], framework="pt"))
    return opened[number].get_slice(name)


def _pieces(value: Filled, here: Here, slices: Open, device: torch.device) -> tuple[Tensor, ...]:
    dtype, held = getattr(torch, value.dtype), Grid(value.mesh, value.axes, here).held
    return tuple(_piece(value.shapes[piece], value.reads[piece], slices, dtype, device) for piece in held)


def _piece(shape: Sequence[int], reads: Sequence[Read], slices: Open, dtype: torch.dtype, device: torch.device) -> Tensor:
    piece = torch.empty(shape, dtype=dtype, device=device)
    for read in reads:
        box = slices(read.source)[_box(read.offset, read.size) if read.size else ...]
        piece[_box(read.at, read.shape)].copy_(box.permute(read.order).reshape(read.shape))
    return piece


def _box(offset: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + n) for start, n in zip(offset, size, strict=True))
