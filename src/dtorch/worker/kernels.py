"""PyTorch's fused attention kernels under one signature: those that give the log-sum-exp of each query's scores.

``inputs`` are (q, k, v), (b, h, s, d) with maybe fewer heads of keys and values; ``results`` are the gradient of the output,
the output and the log-sum-exp, (b, h, s). Nothing is dropped, so a generator's state is a blank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

_aten = torch.ops.aten
Three = tuple[Tensor, Tensor, Tensor]
Forward = Callable[[Three, Tensor | None, bool, float | None], tuple[Tensor, Tensor]]
Backward = Callable[[Three, Three, Tensor | None, bool, float | None], Three]

ALIGNMENT = 16
"""The memory-efficient kernel wants rows of a mask to start at multiples of this many elements."""
POSITIONS = 32
"""The memory-efficient kernel's log-sum-exp has a multiple of this many positions."""


def _cpu(inputs: Three, mask: Tensor | None, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    return _aten._scaled_dot_product_flash_attention_for_cpu(*inputs, 0.0, causal, attn_mask=mask, scale=scale)


def _cpu_backward(results: Three, inputs: Three, mask: Tensor | None, causal: bool, scale: float | None) -> Three:
    grad, *rest = results
    kernel = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    return kernel(grad, *inputs, *rest, 0.0, causal, attn_mask=mask, scale=scale)


def _flash(inputs: Three, mask: Tensor | None, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    return _aten._scaled_dot_product_flash_attention(*inputs, 0.0, causal, False, scale=scale)[:2]


def _flash_backward(results: Three, inputs: Three, mask: Tensor | None, causal: bool, scale: float | None) -> Three:
    grad, out, rows = results
    state = (None, None, inputs[0].shape[2], inputs[1].shape[2], 0.0, causal, _blank(grad), _blank(grad))
    return _aten._scaled_dot_product_flash_attention_backward(grad, *inputs, out, rows.contiguous(), *state, scale=scale)


def _efficient(inputs: Three, mask: Tensor | None, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    kernel = _aten._scaled_dot_product_efficient_attention
    out, rows, *_ = kernel(*inputs, _aligned(mask), True, 0.0, causal, scale=scale)
    return out, rows[:, :, : inputs[0].shape[2]]


def _efficient_backward(results: Three, inputs: Three, mask: Tensor | None, causal: bool, scale: float | None) -> Three:
    grad, out, rows = results
    rows = pad(rows, (0, -rows.shape[2] % POSITIONS), value=float("inf"))
    state = (_blank(grad), _blank(grad), 0.0, [True, True, True, False], causal)
    kernel = _aten._scaled_dot_product_efficient_attention_backward
    return kernel(grad, *inputs, _aligned(mask), out, rows, *state, scale=scale)[:3]


def _cudnn(inputs: Three, mask: Tensor | None, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    out, rows, *_ = _aten._scaled_dot_product_cudnn_attention(*inputs, mask, True, 0.0, causal, False, scale=scale)
    return out, rows.reshape(rows.shape[:3])


def _cudnn_backward(results: Three, inputs: Three, mask: Tensor | None, causal: bool, scale: float | None) -> Three:
    grad, out, rows = results
    lengths = (None, None, inputs[0].shape[2], inputs[1].shape[2])
    state = (rows.contiguous().unsqueeze(-1), _blank(grad), _blank(grad), mask, *lengths, 0.0, causal)
    return _aten._scaled_dot_product_cudnn_attention_backward(grad, *inputs, out, *state, scale=scale)


def _blank(like: Tensor) -> Tensor:
    """State of a generator that nothing is drawn from."""
    return torch.zeros((), dtype=torch.int64, device=like.device)


def _aligned(mask: Tensor | None) -> Tensor | None:
    """The mask in rows that start where the memory-efficient kernel wants them."""
    if mask is None:
        return None
    length = mask.shape[-1]
    return pad(mask, (0, -length % ALIGNMENT))[..., :length] if length % ALIGNMENT else mask.contiguous()


KERNELS: dict[str, tuple[Forward, Backward]] = {
    "flash_attention_for_cpu": (_cpu, _cpu_backward),
    "flash_attention": (_flash, _flash_backward),
    "efficient_attention": (_efficient, _efficient_backward),
    "cudnn_attention": (_cudnn, _cudnn_backward),
}
"""Forward and backward by the middle of PyTorch's name."""
