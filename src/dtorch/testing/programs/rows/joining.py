"""Joins, repetitions, shifts and triangles: copies that change places."""

from __future__ import annotations

from ..draw import Draw


def join(draw: Draw) -> None:
    """Several tensors into one."""
    a = draw.tensor(lambda t: t.ndim < 4)
    value = draw.value(a)
    same = draw.names(lambda t: t.shape == value.shape)
    b = draw.one(same) if draw.chance(0.6) else draw.given(tuple(value.shape))
    if not value.ndim or draw.chance(0.4):
        draw.emit(f"torch.stack([{a}, {b}], {draw.between(-value.ndim - 1, value.ndim)})", moves=True)
        return
    d = draw.dim(a)
    shape = list(value.shape)
    shape[d] = draw.size()
    c = draw.given(shape, value.dtype)
    parts = draw.one(([a, b], [a, c], [c, a, b], [a, a, a]))
    text = draw.one((f"torch.cat([{', '.join(parts)}], {d})", f"torch.hstack([{a}, {b}])", f"torch.vstack([{b}, {a}])"))
    draw.emit(text, moves=True)


def repeat(draw: Draw) -> None:
    """Repetitions."""
    t = draw.tensor(lambda t: 0 < t.ndim < 4)
    times = [draw.between(1, 2) for _ in draw.value(t).shape]
    choices = [f"repeat({times})", f"tile(({draw.between(1, 2)},))", f"repeat_interleave({draw.between(1, 3)}, {draw.dim(t)})"]
    draw.emit(f"{t}.{draw.one(choices)}", moves=True)


def shift(draw: Draw) -> None:
    """Rolled, flipped, turned, padded."""
    t = draw.tensor(lambda t: 0 < t.ndim < 5)
    d, n = draw.dim(t), draw.value(t).ndim
    pad = [draw.between(0, 2) for _ in range(2 * draw.between(1, n))]
    choices = [
        f"{t}.roll({draw.between(-4, 4)}, {d})",
        f"{t}.flip({draw.random.sample(range(n), draw.between(1, n))})",
        f"{t}.roll({draw.between(-9, 9)})",
    ]
    choices += [f"torch.nn.functional.pad({t}, {pad})", f"torch.nn.functional.pad({t}, {pad}, value=2)"]
    if n > 1:
        choices += [f"{t}.rot90({draw.between(-1, 3)})", f"{t}.fliplr()"]
    draw.emit(draw.one(choices), moves=True)


def triangle(draw: Draw) -> None:
    """Triangles and diagonals."""
    t = draw.tensor(lambda t: 0 < t.ndim < 4)
    n, k = draw.value(t).ndim, draw.between(-2, 2)
    choices = [f"{t}.tril({k})", f"{t}.triu({k})"] if n > 1 else []
    choices += [f"{t}.diag({k})"] if n < 3 else []
    draw.emit(draw.one([*choices, f"{t}.diag_embed({k})"]), moves=True)


def grid(draw: Draw) -> None:
    """All pairs of two vectors."""
    a = draw.tensor(lambda t: t.ndim == 1)
    b = draw.given((draw.size(),), draw.value(a).dtype)
    if draw.chance(0.5):
        draw.emit(f"torch.meshgrid({a}, {b}, indexing={draw.one(('ij', 'xy'))!r})", results=2, moves=True)
    else:
        draw.emit(f"torch.cartesian_prod({a}, {b})", moves=True)


def scatter_copy(draw: Draw) -> None:
    """A copy with a part replaced. Of a tensor that overlaps itself, PyTorch's own copy is wrong."""
    t = draw.target(lambda t: t.ndim > 0)
    value, d = draw.value(t), draw.dim(t, negative=False)
    n = value.shape[d]
    start = draw.between(0, n)
    length = draw.between(0, n - start)
    shape = list(value.shape)
    if draw.chance(0.5) and n:
        del shape[d]
        draw.emit(f"{t}.select_scatter({draw.given(shape, value.dtype)}, {d}, {draw.between(-n, n - 1)})", moves=True)
    else:
        shape[d] = length
        draw.emit(f"{t}.slice_scatter({draw.given(shape, value.dtype)}, {d}, {start}, {start + length})", moves=True)


ROWS = ((6, join), (3, repeat), (4, shift), (2, triangle), (1, grid), (2, scatter_copy))
