"""Local steps of attention over a split sequence, run by PyTorch's own fused kernels block by block.

A ring keeps three things for each query: the greatest log-sum-exp of scores so far (``top``), the sum of weights relative to
it (``weight``), and the sum of values by these weights (``total``). A block adds its output with the weight that its own
log-sum-exp gives. All but ``total``, (b, h, s, d), are (b, h, s).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..core.operators import own
from .kernels import KERNELS

NARROW = (torch.float16, torch.bfloat16)
HIDDEN = -1e30
"""A mask whose greatest value in a row is below this hides the row where the kernel says that it saw nothing."""
COARSE = 1e3
"""A log-sum-exp beyond this is too coarse to weigh a block by."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kernel: str, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention of whole sequences of some heads, perhaps of none."""
    if not q.numel():
        dtype = torch.float32 if q.dtype in NARROW else q.dtype
        return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=dtype)
    return KERNELS[kernel][0]((q, k, v), mask, causal, scale)


def attend_backward(
    grad: Tensor,
    out: Tensor,
    rows: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    kernel: str,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, ...]:
    """Gradients of ``attend``."""
    if not q.numel():
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    return KERNELS[kernel][1]((grad, out, rows), (q, k, v), mask, causal, scale)


def ring_start(q: Tensor, pair: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Nothing seen yet: total, top and weight, on every device that has queries or keys."""
    dtype = torch.float32 if q.dtype in NARROW else q.dtype
    total = q.new_zeros((*q.shape[:3], width), dtype=dtype)
    return total, q.new_full(q.shape[:3], float("-inf"), dtype=dtype), q.new_zeros(q.shape[:3], dtype=dtype)


def ring_attend_(
    total: Tensor,
    top: Tensor,
    weight: Tensor,
    q: Tensor,
    pair: Tensor,
    mask: Tensor | None,
    columns: Sequence[int],
    blocks: Sequence[int],
    kernel: str,
    scale: float | None,
) -> None:
    """Merge what the queries find among the keys at hand.

    Args:
        pair: keys and values side by side, (b, g, t, d + e).
        columns: runs of the mask's columns that belong to these keys, flat; none where a column serves all.
        blocks: (row, rows, key, keys, causal) for each block, flat.
    """
    k, v = pair.split([q.shape[3], pair.shape[3] - q.shape[3]], -1)
    mask = _of_columns(mask, columns)
    for rows, keys, causal in _each(blocks, q, mask):
        block = (q[:, :, rows], k[:, :, keys], v[:, :, keys])
        out, seen = KERNELS[kernel][0](block, mask, causal, scale)
        best, sums = seen.to(top.dtype), None
        if mask is not None:
            out, best, sums = _unhidden(out, best, block[0], block[1], mask, scale)
        _merge(total[:, :, rows], top[:, :, rows], weight[:, :, rows], out, best, sums)


def _each(blocks: Sequence[int], q: Tensor, mask: Tensor | None) -> Iterator[tuple[slice, slice, bool]]:
    """The blocks that a device has anything to do for."""
    # A mask that hides a whole block is not worth a kernel, but asking a GPU would cost more than it saves.
    if not q.shape[0] or not q.shape[1] or (mask is not None and mask.device.type == "cpu" and bool(mask.eq(-torch.inf).all())):
        return
    for i in range(0, len(blocks), 5):
        row, rows, key, keys, causal = blocks[i : i + 5]
        yield slice(row, row + rows), slice(key, key + keys), bool(causal)


def _of_columns(mask: Tensor | None, columns: Sequence[int]) -> Tensor | None:
    if mask is None or not columns:
        return mask
    runs = [mask.narrow(-1, columns[i], columns[i + 1]) for i in range(0, len(columns), 2)]
    return runs[0] if len(runs) == 1 else torch.cat(runs, -1)


def _unhidden(
    out: Tensor, best: Tensor, q: Tensor, k: Tensor, mask: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A block's results with rows that saw nothing marked, and rows of huge scores weighed exactly."""
    greatest = mask.amax(-1).to(best.dtype)
    hidden = ((greatest == -torch.inf) | ((greatest < HIDDEN) & (best == 0))).expand(best.shape)
    best = best.masked_fill(hidden, -torch.inf)
    out = out.masked_fill(hidden.unsqueeze(-1), 0)
    coarse = (best.abs() > COARSE) & best.isfinite()
    return (out, *_exact(best, coarse, q, k, mask, scale)) if bool(coarse.any()) else (out, best, None)


def _exact(best: Tensor, coarse: Tensor, q: Tensor, k: Tensor, mask: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Greatest score and sum of the others relative to it, for rows whose log-sum-exp has lost that sum in rounding."""
    at = coarse.flatten(0, 1).any(0).nonzero().flatten()
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1).to(best.dtype)
    factor = q.shape[3] ** -0.5 if scale is None else scale
    scores = q[:, :, at].to(best.dtype) @ keys.transpose(2, 3) * factor
    scores = scores + (mask if mask.shape[-2] == 1 else mask[..., at, :])
    peak = scores.amax(-1)
    sums = (scores - peak.unsqueeze(-1)).exp().sum(-1)
    weights, chosen = torch.ones_like(best), coarse[:, :, at]
    weights[:, :, at] = torch.where(chosen, sums, 1)
    best[:, :, at] = torch.where(chosen, peak, best[:, :, at])
    return best, weights


def _merge(total: Tensor, top: Tensor, weight: Tensor, out: Tensor, best: Tensor, sums: Tensor | None) -> None:
    """Add a block's normalised output, whose scores sum to ``exp(best)`` times ``sums``."""
    after = torch.maximum(top, best)
    base = after.masked_fill(after == -torch.inf, 0)
    before, now = (top - base).exp_(), (best - base).exp_()
    now = now if sums is None else now.mul_(sums)
    total.mul_(before.unsqueeze(-1)).addcmul_(out.to(total.dtype), now.unsqueeze(-1))
    weight.mul_(before).add_(now)
    top.copy_(after)


def ring_weighed(total: Tensor, top: Tensor, weight: Tensor, best: Tensor) -> Tensor:
    """Total and weight relative to a greatest log-sum-exp of several devices, side by side, so that they can be summed."""
    factor = (top - best.masked_fill(best == -torch.inf, 0)).exp_().unsqueeze(-1)
    return torch.cat([total, weight.unsqueeze(-1)], -1).mul_(factor)


def ring_parted(both: Tensor) -> tuple[Tensor, Tensor]:
    """Total and weight."""
    return both[..., :-1], both[..., -1]


def ring_end(total: Tensor, top: Tensor, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; zeros for queries that saw nothing, as PyTorch's kernels have it."""
    nothing = weight == 0
    weight = weight.masked_fill(nothing, 1)
    return (total / weight.unsqueeze(-1)).to(dtype), (top.masked_fill(nothing, 0) + weight.log())


def zeros(like: Tensor, beside: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros of a tensor's shape, on every device that has ``beside``."""
    return like.new_zeros(like.shape, dtype=dtype)


def ring_backward_(
    grad_query: Tensor,
    grad_pair: Tensor,
    grad: Tensor,
    out: Tensor,
    rows: Tensor,
    q: Tensor,
    pair: Tensor,
    mask: Tensor | None,
    columns: Sequence[int],
    blocks: Sequence[int],
    kernel: str,
    scale: float | None,
) -> None:
    """Add the gradients of the blocks between the queries and the keys at hand; arguments as of ``ring_attend_``."""
    width = q.shape[3]
    k, v = pair.split([width, pair.shape[3] - width], -1)
    mask = _of_columns(mask, columns)
    for at, keys, causal in _each(blocks, q, mask):
        results = grad[:, :, at], out[:, :, at], rows[:, :, at]
        inputs = q[:, :, at], k[:, :, keys], v[:, :, keys]
        dq, dk, dv = KERNELS[kernel][1](results, inputs, mask, causal, scale)
        grad_query[:, :, at] += dq
        grad_pair[:, :, keys, :width] += dk
        grad_pair[:, :, keys, width:] += dv


def packed(out: Tensor, rows: Tensor) -> Tensor:
    """Output and log-sum-exp in one tensor, the one bit by bit after the other."""
    return torch.cat([out, rows.contiguous().unsqueeze(-1).view(out.dtype)], -1)


def unpacked(both: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What ``packed`` put together."""
    width = both.shape[3] - dtype.itemsize // both.dtype.itemsize
    return both[..., :width], both[..., width:].contiguous().view(dtype).squeeze(-1)


def ordered(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """The tensor in memory of its own, its dims from the largest stride to the smallest."""
    there = tensor.permute(*order) if tensor.ndim else tensor
    own = there.contiguous()
    return own.permute([list(order).index(d) for d in range(tensor.ndim)])


def columns(tensor: Tensor, start: int, end: int) -> Tensor:
    """A part of the last dim."""
    return tensor[..., start:end]


def summed(tensor: Tensor, counts: Sequence[int]) -> Tensor:
    """Copies of heads (dim 1) summed: so many neighbours for each head."""
    wide = torch.float32 if tensor.dtype in NARROW else tensor.dtype
    sums = [part.sum(1, keepdim=True, dtype=wide) for part in tensor.split(list(counts), 1)]
    return torch.cat(sums, 1).to(tensor.dtype) if sums else tensor[:, :0]


FUNCTIONS = (
    attend,
    attend_backward,
    ring_start,
    ring_attend_,
    ring_weighed,
    ring_parted,
    ring_end,
    zeros,
    ring_backward_,
    packed,
    unpacked,
    ordered,
    columns,
    summed,
)

STAND_INS = {own(function.__name__): function for function in FUNCTIONS}
"""What runs for operators of our own: the functions themselves, for nothing here needs PyTorch's dispatch."""
