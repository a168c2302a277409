"""Tensors as the bytes that they consist of."""

from __future__ import annotations

import torch
from torch import Tensor


def as_bytes(dense: Tensor) -> Tensor:
    """The memory of a tensor that is contiguous, as one dim of dtype uint8."""
    # A tensor of one element is contiguous whatever its strides, and with these PyTorch would not look at its bytes.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
