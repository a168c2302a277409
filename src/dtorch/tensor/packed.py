"""Packed sequences: their lengths are read by the program, which steps through them, so they are no global tensors."""

from __future__ import annotations

from typing import Any

import torch

from . import moving

_aten = torch.ops.aten


def pack_padded_sequence(cls: Any, func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    """The rows that sequences really have, step by step, and how many there are in each step, which is a plain tensor."""
    sequences, lengths, batch_first = args
    lengths = moving.fetch_whole(lengths) if isinstance(lengths, cls) else lengths
    if not isinstance(sequences, cls):
        return func(sequences, lengths, batch_first)
    steps = sequences.transpose(0, 1) if batch_first else sequences
    numbers = torch.arange(steps.shape[0] * steps.shape[1]).view(*steps.shape[:2], 1)
    rows, sizes = func(numbers, lengths, False)
    return steps.flatten(0, 1).index_select(0, rows[:, 0]), sizes


HANDLERS = {_aten._pack_padded_sequence.default: pack_padded_sequence}
