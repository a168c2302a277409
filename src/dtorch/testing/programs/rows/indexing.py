"""Indexing by tensors and masks, gathers, and copies with indices."""

from __future__ import annotations

import torch

from ..draw import Declined, Draw


def places(draw: Draw, n: int, shape: tuple[int, ...] | None = None) -> str:
    """Text of an integer tensor of indices of a dim of length n: a global one, or a plain one."""
    if not n:
        raise Declined
    count = draw.between(1, 5)
    if shape is None and draw.chance(0.3):
        return f"torch.tensor({[draw.between(-n, n - 1) for _ in range(count)]})"
    source = draw.given((count,) if shape is None else shape, torch.int64)
    return f"{source} % {n}"


def unique_places(draw: Draw, n: int) -> list[int]:
    """Different indices of a dim of length n."""
    return draw.random.sample(range(n), draw.between(0, n))


def index(draw: Draw) -> None:
    """``t[i, :, j]`` with tensors, slices, numbers and masks."""
    t = draw.tensor(lambda t: t.ndim > 0)
    value = draw.value(t)
    items, count = [], draw.between(1, 4)
    for n in value.shape[: draw.between(1, value.ndim)]:
        kind = draw.between(0, 4)
        if kind <= 1 and n:
            shape = draw.one(((count,), (count,), (2, count), ()))
            items.append(f"{draw.given(shape, torch.int64)} % {n}")
        elif kind == 2 and n:
            items.append(str(draw.between(-n, n - 1)))
        else:
            items.append(draw.one((":", ":", "1:", "::2", "None, :")))
    draw.emit(f"{t}[{', '.join(items)}]", moves=True)


def mask(draw: Draw) -> None:
    """Elements that a mask selects: the shape depends on data."""
    t = draw.tensor(lambda t: t.ndim > 0)
    value = draw.value(t)
    m = draw.given(tuple(value.shape[: draw.between(1, value.ndim)]), torch.bool)
    exact = draw.tensor(exact=True)
    draw.emit(
        draw.one(
            (
                f"{t}[{m}]",
                f"{exact}.nonzero()",
                f"{exact}[{exact} > 0]",
                f"{t}.masked_select({draw.given(tuple(value.shape), torch.bool)})",
            )
        ),
        moves=True,
    )


def pick(draw: Draw) -> None:
    """``index_select``, ``gather``, ``take``."""
    t = draw.tensor(lambda t: t.ndim > 0)
    value, d = draw.value(t), draw.dim(t)
    n = value.shape[d]
    kind = draw.one(("index_select", "gather", "gather", "take", "take_along_dim", "embedding"))
    if kind == "index_select":
        draw.emit(f"{t}.index_select({d}, {draw.given((draw.size(),), torch.int64)} % {max(n, 1)})", moves=True)
    elif kind == "take":
        draw.emit(f"{t}.take({places(draw, value.numel())})", moves=True)
    elif kind == "embedding" and value.ndim == 2:
        draw.emit(f"torch.nn.functional.embedding({places(draw, value.shape[0], draw.shape())}, {t})", moves=True)
    else:
        shape = [draw.between(0, m) if draw.chance(0.3) else m for m in value.shape]
        shape[d] = draw.size()
        name = "take_along_dim" if kind == "take_along_dim" else "gather"
        i = places(draw, n, tuple(value.shape) if name == "take_along_dim" else tuple(shape))
        draw.emit(f"torch.take_along_dim({t}, {i}, {d})" if name == "take_along_dim" else f"{t}.gather({d}, {i})", moves=True)


def with_index(draw: Draw) -> None:
    """Copies with some rows added to or replaced, and scatters."""
    t = draw.tensor(lambda t: t.ndim > 0)
    text, moves = scattered(draw, t, t, "")
    draw.emit(text, moves=moves)


def scattered(draw: Draw, t: str, like: str, suffix: str) -> tuple[str, bool]:
    """Text that scatters into ``t``, of the shape of ``like``, and whether it only moves numbers.

    Args:
        suffix: ``_`` for the operator in place.
    """
    value, d = draw.value(like), draw.dim(like, negative=False)
    n = value.shape[d]
    rows = unique_places(draw, n)
    part = list(value.shape)
    part[d] = len(rows)
    kind = draw.one(
        ("index_copy", "index_add", "index_fill", "scatter_add", "scatter", "index_put", "masked_fill", "scatter_reduce")
    )
    i = f"torch.tensor({rows}, dtype=torch.int64)"
    if kind == "index_fill":
        return f"{t}.index_fill{suffix}({d}, {i}, {draw.number(like)})", True
    if kind == "masked_fill":
        return f"{t}.masked_fill{suffix}({draw.given(draw.into(value.shape), torch.bool)}, {draw.number(like)})", True
    if kind == "index_put":
        many = places(draw, n)
        added = draw.given((1, *value.shape[1:]), value.dtype) if not d else None
        if added is None:
            raise Declined
        return f"{t}.index_put{suffix}(({many},), {added}, accumulate=True)", False
    if kind in ("scatter_add", "scatter_reduce"):
        shape = tuple(draw.between(0, m) if draw.chance(0.3) else m for m in value.shape)
        source = draw.given(shape, value.dtype)
        how = draw.one(("amax", "amin", "sum")) if kind == "scatter_reduce" else ""
        return f"{t}.{kind}{suffix}({d}, {places(draw, n, shape)}, {source}{f', {how!r}' if how else ''})", False
    source = draw.given(part, value.dtype)
    if kind == "scatter":
        wide = [len(rows) if e == d else 1 for e in range(value.ndim)]
        return f"{t}.scatter{suffix}({d}, {i}.view({wide}).expand({part}), {source})", True
    return f"{t}.{kind}{suffix}({d}, {i}, {source})", kind == "index_copy"


ROWS = ((6, index), (3, mask), (5, pick), (4, with_index))
