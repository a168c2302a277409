"""Collectives over pieces that one worker holds: pure functions on tensors, no process involved.

Every result is a new tensor that shares no memory with its sources. Results keep the order of strides of their sources,
as pointwise operators do, so a transposed value stays transposed. Where pieces are put together, that order is given: a
piece of size 1 along a dim cannot tell where the dim belongs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Part = tuple[int, Sequence[int], Sequence[int], Sequence[int]]
"""(source piece, offset in source, offset in target, size), the last three per dim, in elements."""


def all_gather(line: Sequence[Tensor], dim: int, order: Sequence[int] = (), into: Tensor | None = None) -> Tensor:
    """Concatenate one line of pieces.

    Args:
        line: local tensors that are alike but for the size of ``dim``; sizes may be uneven or zero.
        dim: tensor dim, not negative.
        order: dims from the largest stride to the smallest; that of the first piece when omitted.
        into: what an earlier gather of such pieces gave: it is written, and its memory brought back if it was dropped.
    """
    order = order or _memory_order(next((t for t in line if t.numel()), line[0]))
    # Allotted here, for torch.cat would guess a layout where pieces leave it open.
    shape = [*line[0].shape[:dim], sum(t.shape[dim] for t in line), *line[0].shape[dim + 1 :]]
    whole = allotted(shape, line[0], order, into)
    torch.cat([t.permute(*order) for t in line], order.index(dim), out=whole)
    return arranged(whole, order)


def allotted(shape: Sequence[int], like: Tensor, order: Sequence[int], into: Tensor | None = None) -> Tensor:
    """Memory for a tensor of a shape, as a dense tensor whose dims are in an order; that of ``into`` where it is given."""
    if into is None:
        return torch.empty([shape[d] for d in order], dtype=like.dtype, device=like.device)
    into.untyped_storage().resize_(into.numel() * into.element_size())
    return into.permute(*order)


def arranged(dense: Tensor, order: Sequence[int]) -> Tensor:
    """A tensor whose dims are in an order, with its dims as they belong."""
    return dense.permute(_inverse(order))


def all_reduce(line: Sequence[Tensor], op: str, into: Tensor | None = None) -> Tensor:
    """Reduce one line of pieces of one shape, from first to last, so that the result does not depend on timing.

    Integers average rounding down, without overflow on the way; on bool, a sum is *or* and a product is *and*.

    Args:
        op: ``"sum"``, ``"avg"``, ``"max"``, ``"min"`` or ``"prod"``.
        into: where the result goes, which may be one of the first two pieces; not for averages of integers.
    """
    combine, combine_into = _COMBINE[op]
    if len(line) == 1 or not line[0].numel():
        return line[0].clone() if into is None else into.copy_(line[0])
    if op == "avg" and not (line[0].is_floating_point() or line[0].is_complex() or line[0].dtype == torch.bool):
        return _integer_average(line)
    total = combine(line[0], line[1]) if into is None else combine(line[0], line[1], out=into)
    for piece in line[2:]:
        combine_into(total, piece)
    if op == "avg" and total.dtype != torch.bool:
        total.div_(len(line))
    return total


def _integer_average(line: Sequence[Tensor]) -> Tensor:
    """The average rounded down: whole quotients and remainders apart, so that no sum overflows."""
    k, dtype = len(line), line[0].dtype
    quotients = all_reduce([t.div(k, rounding_mode="floor") for t in line], "sum")
    remainders = all_reduce([(t % k).long() for t in line], "sum")
    return quotients.add_(remainders.div_(k, rounding_mode="floor").to(dtype))


def reduce_scatter(line: Sequence[Tensor], op: str, dim: int, start: int, size: int) -> Tensor:
    """One piece of the reduction of a line: ``size`` elements along ``dim`` from ``start``. The whole never exists.

    Args:
        op: as for ``all_reduce``.
    """
    return all_reduce([t.narrow(dim, start, size) for t in line], op)


def all_to_all(line: Sequence[Tensor], from_dim: int, dim: int, start: int, size: int, order: Sequence[int] = ()) -> Tensor:
    """One piece of a line split anew: ``size`` elements along ``dim`` from ``start`` of the line joined along ``from_dim``.

    Args:
        from_dim, dim: two different tensor dims.
        order: as for ``all_gather``.
    """
    return all_gather([t.narrow(dim, start, size) for t in line], from_dim, order)


def keep(piece: Tensor, dim: int, start: int, size: int) -> Tensor:
    """A copy of ``size`` elements along ``dim`` from ``start``."""
    kept = piece.narrow(dim, start, size)
    # A copy of nothing would keep the strides of an expanded tensor, and look contiguous all the same.
    return kept.clone() if kept.numel() else kept.new_empty(kept.shape)


def fill(piece: Tensor, op: str, *, first: bool) -> Tensor:
    """One part of a partial made from a whole value: the first part is the value, the others change nothing.

    For ``"avg"`` every part is the value.
    """
    if first or op == "avg":
        return piece.clone()
    return torch.full_like(piece, _identity(op, piece.dtype))


def assemble(
    sources: Sequence[Tensor],
    parts: Sequence[Part],
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    order: Sequence[int],
) -> Tensor:
    """Build one target piece from parts of source pieces, which may lie on another device.

    Args:
        sources: source pieces.
        parts: what to copy; together they cover the target.
        shape: local shape of the target piece.
        order: dims from the largest stride to the smallest.
    """
    target = torch.empty([shape[d] for d in order], dtype=dtype, device=device).permute(_inverse(order))
    for number, from_offset, to_offset, size in parts:
        box(target, to_offset, size).copy_(box(sources[number], from_offset, size))
    return target


def box(tensor: Tensor, offset: Sequence[int], size: Sequence[int]) -> Tensor:
    """The view of a tensor at an offset, of a size, both per dim."""
    for dim, (start, length) in enumerate(zip(offset, size, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, length)
    return tensor


def _memory_order(tensor: Tensor) -> list[int]:
    """Dims from the largest stride to the smallest. An expanded tensor has no order of its own: it counts as row-major."""
    strides, dims = tensor.stride(), list(range(tensor.ndim))
    if any(step == 0 and size > 1 for step, size in zip(strides, tensor.shape, strict=True)):
        return dims
    return sorted(dims, key=lambda d: -strides[d])


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(d) for d in range(len(order))]


def _identity(op: str, dtype: torch.dtype) -> float | int | bool:
    """The number that changes nothing when it is combined by ``op``."""
    if op in ("sum", "prod"):
        return 0 if op == "sum" else 1
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return float("-inf") if op == "max" else float("inf")
    limits = torch.iinfo(dtype)
    return limits.min if op == "max" else limits.max


def _maximum_into(total: Tensor, piece: Tensor) -> Tensor:
    return torch.maximum(total, piece, out=total)


def _minimum_into(total: Tensor, piece: Tensor) -> Tensor:
    return torch.minimum(total, piece, out=total)


_COMBINE: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "sum": (torch.add, Tensor.add_),
    "avg": (torch.add, Tensor.add_),
    "max": (torch.maximum, _maximum_into),
    "min": (torch.minimum, _minimum_into),
    "prod": (torch.mul, Tensor.mul_),
}
