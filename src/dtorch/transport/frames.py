"""Tensors as raw frames: a small header and the bytes as they lie in memory, so that strides survive."""

from __future__ import annotations

import math

import msgspec
import torch
from torch import Tensor

from ..core.errors import ProtocolError
from ..core.raw import as_bytes

Frame = bytes | bytearray | memoryview


class TensorHeader(msgspec.Struct, frozen=True, array_like=True):
    """Where a tensor's bytes are and how to read them: dims from the largest stride to the smallest."""

    frame: int
    dtype: str
    shape: list[int]
    order: list[int]


def to_frame(tensor: Tensor, number: int) -> tuple[TensorHeader, memoryview]:
    """A tensor's header and bytes; frame ``number`` of its message. A CPU tensor that lies dense is not copied."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    # An expanded tensor has no order of its own: as a copy would, it becomes row-major.
    expanded = any(step == 0 and size > 1 for step, size in zip(plain.stride(), plain.shape, strict=True))
    order = list(range(plain.ndim)) if expanded else sorted(range(plain.ndim), key=lambda d: -plain.stride()[d])
    dense = plain.permute(order).contiguous()
    header = TensorHeader(number, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), order)
    return header, as_bytes(dense).numpy().data


def from_frame(header: TensorHeader, frame: Frame) -> Tensor:
    """The tensor of a header and its bytes, in memory of its own, on the CPU.

    Raises:
        ProtocolError: there are more or fewer bytes than the header says.
    """
    dtype = getattr(torch, header.dtype)
    dense_shape = [header.shape[d] for d in header.order]
    if len(frame) != math.prod(dense_shape) * dtype.itemsize:
        raise ProtocolError(f"a frame of {len(frame)} bytes for a tensor of shape {header.shape} and dtype {header.dtype}")
    inverse = [header.order.index(d) for d in range(len(header.order))]
    if not frame:
        return torch.empty(dense_shape, dtype=dtype).permute(inverse)
    flat = torch.frombuffer(bytearray(frame), dtype=torch.uint8).view(dtype)
    return flat.reshape(dense_shape).permute(inverse)
