"""Products of matrices."""

from __future__ import annotations

from ..draw import Draw


def matmul(draw: Draw) -> None:
    """``@`` with a partner that fits, broadcast batches among it."""
    a = draw.tensor(lambda t: 0 < t.ndim < 4)
    value = draw.value(a)
    k, batch = value.shape[-1], tuple(value.shape[:-2]) if draw.chance(0.4) else ()
    shape = (k,) if draw.chance(0.2) else (*batch, k, draw.size())
    b = draw.given(shape, value.dtype if draw.chance(0.9) or not value.numel() else None)
    name = draw.one(("matmul", "matmul", "inner")) if len(shape) == 1 else "matmul"
    draw.emit(f"torch.{name}({a}, {b})")


def self_product(draw: Draw) -> None:
    """A matrix with its own transpose."""
    a = draw.tensor(lambda t: 1 < t.ndim < 5)
    draw.emit(draw.one((f"{a} @ {a}.mT", f"{a}.mT @ {a}")))


def plus_product(draw: Draw) -> None:
    """``addmm``, ``linear``, ``baddbmm``."""
    a = draw.tensor(lambda t: 1 < t.ndim < 4)
    value = draw.value(a)
    n = draw.size()
    if draw.chance(0.4):
        w, bias = draw.given((n, value.shape[-1]), value.dtype), draw.given((n,), value.dtype)
        draw.emit(f"torch.nn.functional.linear({a}, {w}, {bias})")
    elif value.ndim == 2:
        b = draw.given((value.shape[1], n), value.dtype)
        c = draw.given(draw.into((value.shape[0], n)), value.dtype)
        draw.emit(f"torch.addmm({c}, {a}, {b}, beta={draw.between(0, 2)}, alpha={draw.between(-1, 2)})")
    else:
        b = draw.given((value.shape[0], value.shape[2], n), value.dtype)
        c = draw.given((value.shape[0], value.shape[1], n), value.dtype)
        draw.emit(draw.one((f"torch.baddbmm({c}, {a}, {b})", f"torch.bmm({a}, {b})")))


def einsum(draw: Draw) -> None:
    """Sums over letters."""
    a = draw.tensor(lambda t: t.ndim == 2)
    value = draw.value(a)
    text, shape = draw.one(
        (
            ("ij,jk->ik", (value.shape[1], draw.size())),
            ("ij,ij->j", tuple(value.shape)),
            ("ij,kj->ki", (draw.size(), value.shape[1])),
            ("ij,k->kij", (draw.size(),)),
            ("ij,i->j", (value.shape[0],)),
        )
    )
    draw.emit(f"torch.einsum({text!r}, {a}, {draw.given(shape, value.dtype)})")


def vectors(draw: Draw) -> None:
    """Products of vectors."""
    a = draw.tensor(lambda t: t.ndim == 1)
    value = draw.value(a)
    b = draw.given(tuple(value.shape), value.dtype)
    draw.emit(draw.one((f"torch.dot({a}, {b})", f"torch.outer({a}, {b})", f"{a} @ {b}", f"torch.kron({a}, {b})")))


ROWS = ((6, matmul), (2, self_product), (3, plus_product), (2, einsum), (2, vectors))
