"""``Laid``: a tensor without data that knows its ``Region``, so that code written for tensors tells where elements go.

The conversions that `transformers` applies between files and models (stacking experts, joining gate and up projections)
are run on these. What only moves elements is understood; what computes is refused, for then a part of a file is no part
of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...core.errors import UsageError
from ...core.placements import balanced, starts
from .problem import problem
from .regions import Region, cat

aten = torch.ops.aten


class Unfit(Exception):
    """Tensors that are to be joined have shapes that do not fit."""


class Laid(torch.Tensor):
    """A tensor of a region's shape. Operators that move elements give others, any other raises ``UsageError``."""

    region: Region

    @staticmethod
    def of(region: Region, dtype: torch.dtype) -> Laid:
        """The tensor of a region."""
        made: Any = torch.Tensor._make_wrapper_subclass(Laid, region.shape, dtype=dtype, device=torch.device("meta"))
        made.region = region
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        move = MOVES.get(func)
        if move is None:
            raise _refused(func, args)
        out = move(*args, **{k: v for k, v in (kwargs or {}).items() if k in ("dim", "start", "end")})
        dtype = (kwargs or {}).get("dtype") or _first(args).dtype
        return [cls.of(r, dtype) for r in out] if isinstance(out, list) else cls.of(out, dtype)


def _first(args: Sequence[Any]) -> Laid:
    return args[0] if isinstance(args[0], Laid) else args[0][0]


def _refused(func: Any, args: Sequence[Any]) -> UsageError:
    seen = [n for a in args for t in (a if isinstance(a, list | tuple) else [a]) if isinstance(t, Laid) for n in t.region.names]
    return problem(
        f"a conversion of {', '.join(seen[:3]) or 'weights'} by {func}",
        "between file and model, weights may be renamed, stacked, joined, cut and transposed",
        "load the model with transformers and call dtorch.parallelize, or save what to_torch() gives",
        "load_pretrained / save_pretrained",
    )


def _same(x: Laid, *args: Any) -> Region:
    return x.region


def _cat(items: Sequence[Laid], dim: int = 0) -> Region:
    return _joined([x.region for x in items], dim % items[0].ndim)


def _stack(items: Sequence[Laid], dim: int = 0) -> Region:
    at = dim % (items[0].ndim + 1)
    return _joined([x.region.unsqueeze(at if x.ndim == items[0].ndim else 0) for x in items], at)


def _joined(regions: Sequence[Region], dim: int) -> Region:
    across = {(*r.shape[:dim], *r.shape[dim + 1 :]) for r in regions}
    if len(across) > 1:
        raise Unfit(" beside ".join(f"{r.names[0]} {r.shape}" for r in regions))
    return cat(regions, dim)


def _slice(x: Laid, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Region:
    if step != 1:
        raise _refused(aten.slice.Tensor, [x])
    dim = dim % x.ndim
    begin, stop, _ = slice(start, end).indices(x.shape[dim])
    return x.region.narrow(dim, begin, max(stop - begin, 0))


def _select(x: Laid, dim: int, index: int) -> Region:
    dim = dim % x.ndim
    return x.region.narrow(dim, index % x.shape[dim], 1).squeeze(dim)


def _split_sizes(x: Laid, sizes: Sequence[int], dim: int = 0) -> list[Region]:
    dim = dim % x.ndim
    return [x.region.narrow(dim, start, n) for start, n in zip(starts(sizes), sizes, strict=True)]


def _split(x: Laid, size: int, dim: int = 0) -> list[Region]:
    length = x.shape[dim % x.ndim]
    return _split_sizes(x, [min(size, length - start) for start in range(0, length, size)] or [0], dim)


def _unbind(x: Laid, dim: int = 0) -> list[Region]:
    dim = dim % x.ndim
    return [piece.squeeze(dim) for piece in _split_sizes(x, balanced(x.shape[dim], x.shape[dim]), dim)]


def _transpose(x: Laid, a: int, b: int) -> Region:
    order = list(range(x.ndim))
    order[a], order[b] = order[b], order[a]
    return x.region.permute(order)


def _permute(x: Laid, order: Sequence[int]) -> Region:
    return x.region.permute([d % x.ndim for d in order])


def _squeeze(x: Laid, dim: int) -> Region:
    dim = dim % x.ndim
    return x.region.squeeze(dim) if x.shape[dim] == 1 else x.region


MOVES: dict[Any, Callable[..., Region | list[Region]]] = {
    aten.alias.default: _same,
    aten.cat.default: _cat,
    aten.clone.default: _same,
    aten.detach.default: _same,
    aten.permute.default: _permute,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_sizes,
    aten.squeeze.dim: _squeeze,
    aten.stack.default: _stack,
    aten.t.default: lambda x: x.region.permute(range(x.ndim)[::-1]),
    aten.transpose.int: _transpose,
    aten.unbind.int: _unbind,
    aten.unsqueeze.default: lambda x, dim: x.region.unsqueeze(dim % (x.ndim + 1)),
    aten._to_copy.default: _same,
}
