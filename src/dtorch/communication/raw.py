"""Tensors as the bytes that travel between workers: dense, in an order of dims that both sides know."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.raw import as_bytes

KEPT_NBYTES = 64 << 20
"""How much memory a thread keeps for what it packs and receives: fresh memory costs several times what filling it does."""

ALIGNED = 64


class Scratch(threading.local):
    """Memory that serves until the next exchange begins, one for each thread."""

    def __init__(self) -> None:
        self._kept = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def begin(self) -> None:
        """All of it is free again."""
        if len(self._kept) < self._used <= KEPT_NBYTES:
            self._kept = torch.empty(self._used, dtype=torch.uint8)
        self._used = 0

    def room(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A dense tensor of it, or of fresh memory where it does not suffice."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        start = self._used
        self._used += -(-nbytes // ALIGNED) * ALIGNED
        if device.type != "cpu" or self._used > len(self._kept):
            return torch.empty(list(shape), dtype=dtype, device=device)
        return self._kept.narrow(0, start, nbytes).view(dtype).view(list(shape))


scratch = Scratch()


def packed(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """The bytes of a tensor, its dims laid out in an order; shares memory with one that lies so already, else is scratch."""
    dense = tensor.detach().resolve_conj().resolve_neg().permute(list(order))
    if not dense.is_contiguous():
        dense = scratch.room(dense.shape, dense.dtype, dense.device).copy_(dense)
    return as_bytes(dense)


def blank(shape: Sequence[int], dtype: torch.dtype, device: torch.device, order: Sequence[int]) -> tuple[Tensor, Tensor]:
    """A tensor of scratch to be filled, its dims laid out in an order, and the bytes it consists of."""
    dense = scratch.room([shape[d] for d in order], dtype, device)
    return dense.permute([order.index(d) for d in range(len(order))]), as_bytes(dense)
