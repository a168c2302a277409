"""Views, moves to other placements, and the end of a tensor."""

from __future__ import annotations

from ..draw import Declined, Draw


def order(draw: Draw) -> None:
    """Dims in another order."""
    t = draw.tensor(lambda t: t.ndim > 0)
    n = draw.value(t).ndim
    a, b = draw.dim(t), draw.dim(t)
    permuted = draw.random.sample(range(n), n)
    choices = [f"transpose({a}, {b})", f"permute({permuted})", f"movedim({a}, {b})", "mT" if n > 1 else f"swapaxes({a}, {b})"]
    draw.emit(f"{t}.{draw.one(choices)}", moves=True)


def part(draw: Draw) -> None:
    """A slice, a row, a diagonal."""
    t = draw.tensor(lambda t: t.ndim > 0)
    value, d = draw.value(t), draw.dim(t, negative=False)
    n = value.shape[d]
    if draw.chance(0.4):
        draw.emit(f"{t}[{', '.join(index_of(draw, m) for m in value.shape[: draw.between(1, value.ndim)])}]", moves=True)
    elif draw.chance(0.3) and value.ndim > 1:
        e = (d + draw.between(1, value.ndim - 1)) % value.ndim
        draw.emit(f"{t}.diagonal({draw.between(-1, 1)}, {d}, {e})", moves=True)
    elif draw.chance(0.5) or not n:
        start = draw.between(0, n)
        draw.emit(f"{t}.narrow({d}, {start}, {draw.between(0, n - start)})", moves=True)
    else:
        draw.emit(f"{t}.select({d}, {draw.between(-n, n - 1)})", moves=True)


def index_of(draw: Draw, n: int) -> str:
    """An index of a dim of length n that makes a view."""
    kind = draw.between(0, 5)
    if kind == 0 and n:
        return str(draw.between(-n, n - 1))
    if kind == 1:
        return f"{draw.between(-n - 1, n + 1)}:"
    if kind == 2:
        return f":{draw.between(-n - 1, n + 1)}"
    if kind == 3:
        return f"{draw.between(-n, n)}:{draw.between(-n, n)}:{draw.between(1, 3)}"
    return draw.one(("None, :", "...")) if kind == 4 and draw.chance(0.3) else ":"


def shape(draw: Draw) -> None:
    """The same elements in other dims."""
    t = draw.tensor()
    value = draw.value(t)
    kind = draw.one(("view", "reshape", "flatten", "squeeze", "unsqueeze", "unflatten", "ravel"))
    if kind in ("view", "reshape"):
        text = f"{kind}({regrouped(draw, value.shape)})"
    elif kind == "unsqueeze":
        text = f"unsqueeze({draw.between(-value.ndim - 1, value.ndim)})"
    elif kind == "squeeze":
        text = f"squeeze({draw.dim(t) if draw.chance(0.6) else ''})"
    elif kind == "unflatten":
        d = draw.dim(t)
        divisors = [k for k in range(1, value.shape[d] + 1) if value.shape[d] % k == 0] or [1]
        text = f"unflatten({d}, ({draw.one(divisors)}, -1))"
    elif kind == "flatten" and value.ndim:
        start = draw.between(0, value.ndim - 1)
        text = f"flatten({start}, {draw.between(start, value.ndim - 1)})"
    else:
        text = "ravel()"
    draw.emit(f"{t}.{text}", moves=True)


def regrouped(draw: Draw, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape of as many elements: dims merged, split, or of length one added."""
    out = list(shape)
    for _ in range(draw.between(1, 2)):
        at = draw.between(0, max(0, len(out) - 1))
        if len(out) > at + 1 and draw.chance(0.5):
            out[at : at + 2] = [out[at] * out[at + 1]]
        elif out and out[at] > 1 and draw.chance(0.7):
            k = draw.one([k for k in range(1, out[at] + 1) if out[at] % k == 0])
            out[at : at + 1] = [k, out[at] // k]
        elif draw.chance(0.5):
            out.insert(at, 1)
        else:
            out = [torch_size(out)]
    return tuple(out)


def torch_size(shape: list[int]) -> int:
    """Number of elements."""
    n = 1
    for m in shape:
        n *= m
    return n


def pieces(draw: Draw) -> None:
    """Several views at once."""
    t = draw.tensor(lambda t: t.ndim > 0)
    value, d = draw.value(t), draw.dim(t)
    n = value.shape[d]
    if not 1 <= n <= 4:
        raise Declined
    kind = draw.one(("unbind", "split", "chunk", "tensor_split", "sizes"))
    if kind == "unbind":
        draw.emit(f"{t}.unbind({d})" + ("[0]" if n == 1 else ""), results=n, moves=True)
    elif kind == "sizes":
        first = draw.between(0, n)
        draw.emit(f"{t}.split([{first}, {n - first}], {d})", results=2, moves=True)
    else:
        count = draw.between(1, n)
        got = len(getattr(value.detach(), kind)(count, d))
        draw.emit(f"{t}.{kind}({count}, {d})" + ("[0]" if got == 1 else ""), results=got, moves=True)


def spread(draw: Draw) -> None:
    """Views that show elements more than once."""
    t = draw.tensor(lambda t: 0 < t.ndim < 4)
    value = draw.value(t)
    d = draw.dim(t, negative=False)
    if draw.chance(0.4):
        size = draw.between(1, max(1, value.shape[d]))
        draw.emit(f"{t}.unfold({d}, {size}, {draw.between(1, 3)})", moves=True)
    else:
        sizes = [draw.between(1, 3) if n == 1 else draw.one((-1, n)) for n in value.shape]
        draw.emit(f"{t}.expand({[draw.between(1, 3), *sizes] if draw.chance(0.3) else sizes})", moves=True)


def of_complex(draw: Draw) -> None:
    """Real parts, conjugates, real views."""
    t = draw.tensor(lambda t: t.is_complex())
    draw.emit(
        draw.one(
            (
                f"{t}.real",
                f"{t}.imag",
                f"{t}.conj()",
                f"torch.view_as_real({t})",
                f"{t}.mH" if draw.value(t).ndim > 1 else f"{t}.conj()",
            )
        ),
        moves=True,
    )


def detach(draw: Draw) -> None:
    """The same memory outside autograd."""
    draw.emit(f"{draw.tensor()}.{draw.one(('detach()', 'data', 'contiguous()'))}", moves=True)


def move(draw: Draw) -> None:
    """Other placements."""
    t = draw.tensor()
    value = draw.value(t)
    draw.emit(f"move({t}, {draw.placements(value.shape, value.dtype)})", moves=True)


def forget(draw: Draw) -> None:
    """Delete a tensor."""
    if len(draw.names()) > 2:
        draw.emit(f"del {draw.tensor()}", results=0)


ROWS = ((6, order), (8, part), (8, shape), (4, pieces), (3, spread), (1, of_complex), (2, detach), (8, move), (2, forget))
