"""Tensors as the bytes that travel between workers: dense, in an order of dims that both sides know."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def packed(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """The bytes of a tensor, its dims laid out in an order; shares memory with one that lies so already."""
    dense = tensor.detach().resolve_conj().resolve_neg().permute(list(order)).contiguous()
    return dense.reshape(-1).view(torch.uint8)


def blank(shape: Sequence[int], dtype: torch.dtype, device: torch.device, order: Sequence[int]) -> tuple[Tensor, Tensor]:
    """A tensor to be filled, its dims laid out in an order, and the bytes it consists of."""
    dense = torch.empty([shape[d] for d in order], dtype=dtype, device=device)
    return dense.permute([order.index(d) for d in range(len(order))]), dense.reshape(-1).view(torch.uint8)
