"""In-place writes: to bases, through views, to slices, by masks and indices, by ``out=``."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from .. import memory
from ..draw import Declined, Draw
from .indexing import scattered
from .views import index_of

SIMPLE = ["neg_", "abs_", "zero_", "relu_", "square_", "sign_", "logical_not_", "conj_physical_", "trunc_"]
NUMBER = ["mul_", "add_", "sub_", "fill_", "clamp_", "eq_", "floor_divide_", "remainder_"]
PAIRED = ["add_", "sub_", "mul_", "copy_", "copy_", "copy_", "maximum_", "logical_and_", "gt_"]
ROUND = ["div_", "exp_", "sigmoid_", "tanh_", "sin_"]


def simple(draw: Draw) -> None:
    """Of one tensor alone, or with a number."""
    t = draw.target(repeated=True)
    if draw.chance(0.4):
        draw.emit(f"{t}.{draw.one(SIMPLE)}()", results=0)
    elif draw.chance(0.9):
        draw.emit(f"{t}.{draw.one(NUMBER)}({draw.number(t)})", results=0)
    else:
        name = draw.one(ROUND)
        draw.emit(f"{t}.{name}({'2' if name == 'div_' else ''})", results=0, rounds=True)


def paired(draw: Draw) -> None:
    """With another tensor, broadcast or of another dtype."""
    t = draw.target(repeated=True)
    shape = draw.value(t).shape
    fits = draw.names(
        lambda u: u.ndim <= len(shape) and all(a in (1, b) for a, b in zip(reversed(u.shape), reversed(shape), strict=False))
    )
    u = draw.one(fits) if fits and draw.chance(0.6) else draw.given(draw.into(shape))
    draw.apart(t, u)
    if draw.value(t).dtype == torch.bool and draw.value(u).requires_grad:
        # PyTorch may or may not find that a bool has no gradient.
        raise Declined
    name = draw.one(PAIRED)
    draw.emit(f"{t}.{name}({u})" if name != "maximum_" else f"torch.maximum({t}, {u}, out={t})", results=0)


def set_item(draw: Draw) -> None:
    """``t[...] = `` a number or a tensor that is broadcast."""
    t = draw.target(lambda t: t.ndim > 0)
    value = draw.value(t)
    index = ", ".join(index_of(draw, n) for n in value.shape[: draw.between(1, value.ndim)])
    part = _tried(f"t[{index}]", {"t": value.detach()})
    if part is None:
        raise Declined
    source = draw.number(t) if draw.chance(0.4) else draw.given(draw.into(part.shape), value.dtype if draw.chance(0.8) else None)
    sign = draw.one(("=", "=", "+=", "*="))
    draw.emit(f"{t}[{index}] {sign} {source}", results=0)


def by_mask(draw: Draw) -> None:
    """``t[mask] = `` a number or a tensor."""
    t = draw.target(lambda t: t.ndim > 0)
    value = draw.value(t)
    m = draw.given(tuple(value.shape[: draw.between(1, value.ndim)]), torch.bool)
    if draw.chance(0.6):
        draw.emit(f"{t}[{m}] = {draw.number(t)}", results=0)
    elif draw.chance(0.5):
        draw.emit(f"{t}.masked_fill_({draw.given(draw.into(value.shape), torch.bool)}, {draw.number(t)})", results=0)
    elif draw.chance(0.5):
        count = int(draw.value(m).sum())
        source = draw.given((count, *value.shape[draw.value(m).ndim :]), value.dtype)
        draw.emit(f"{t}[{m}] = {source}", results=0)
    else:
        whole = draw.given(tuple(value.shape), torch.bool)
        draw.emit(f"{t}.masked_scatter_({whole}, {draw.given(tuple(value.shape), value.dtype)})", results=0)


def by_index(draw: Draw) -> None:
    """Scatters and indexed writes."""
    t = draw.target(lambda t: t.ndim > 0)
    if draw.chance(0.3) and draw.value(t).shape[0]:
        n = draw.value(t).shape[0]
        rows = draw.random.sample(range(n), draw.between(1, n))
        source = draw.given(draw.into((len(rows), *draw.value(t).shape[1:])), draw.value(t).dtype)
        draw.emit(f"{t}[torch.tensor({rows})] {draw.one(('=', '+='))} {source}", results=0)
    else:
        draw.emit(scattered(draw, t, t, "_")[0], results=0)


def out(draw: Draw) -> None:
    """``out=`` of simple operators."""
    t = draw.target(lambda t: not t.requires_grad)
    value = draw.value(t)
    a = draw.given(tuple(value.shape), value.dtype if draw.chance(0.7) else None)
    b = draw.given(draw.into(value.shape), value.dtype)
    choices = [f"torch.add({a}, {b}, out={t})", f"torch.mul({a}, {b}, out={t})", f"torch.eq({a}, {b}, out={t})"]
    if value.ndim:
        d = draw.dim(t, negative=False)
        wide = (*value.shape[:d], draw.size(), *value.shape[d + 1 :])
        taller = (*value.shape[:d], draw.size(), *value.shape[d:])
        choices.append(f"torch.sum({draw.given(taller, value.dtype)}, {d}, out={t})")
        if value.shape[d] == 1:
            choices.append(f"torch.amax({draw.given(wide, value.dtype)}, {d}, keepdim=True, out={t})")
        if value.shape[d] > 1:
            shape = (*value.shape[:d], 1, *value.shape[d + 1 :])
            rest = (*value.shape[:d], value.shape[d] - 1, *value.shape[d + 1 :])
            choices.append(f"torch.cat([{draw.given(shape, value.dtype)}, {draw.given(rest, value.dtype)}], {d}, out={t})")
    if value.ndim == 2:
        k = draw.size()
        left, right = draw.given((value.shape[0], k), value.dtype), draw.given((k, value.shape[1]), value.dtype)
        choices.append(f"torch.mm({left}, {right}, out={t})")
    draw.emit(draw.one(choices), results=0)


def out_of_any_kind(draw: Draw) -> None:
    """``out=`` of another shape and dtype than the result's: cast, resized or refused."""
    a = draw.tensor(lambda t: not t.requires_grad, exact=True)
    call = _call(draw, a)
    result = _tried(f"{call})", draw.plain.names)
    if result is None:
        raise Declined
    if draw.chance(0.5):
        shape = draw.one((tuple(result.shape), tuple(result.shape), (0,), draw.shape()))
        t = draw.given(shape, result.dtype if draw.chance(0.3) else None)
    else:
        t = draw.target(lambda t: not t.requires_grad)
    if memory.of(draw.value(t)) == memory.of(draw.value(a)) or _leaves_views(draw, t, result) or _spoils(draw, call, t):
        raise Declined
    draw.emit(f"{call}, out={t})", results=0)


def _call(draw: Draw, a: str) -> str:
    """A call on a tensor, but for the closing bracket."""
    choices = [f"torch.{name}({a}" for name in ("neg", "abs", "square", "sign", "logical_not", "relu", "trunc")]
    choices += [f"torch.{name}({a}, {draw.number(a)}" for name in ("add", "mul", "eq", "gt", "sub", "clamp", "remainder")]
    if draw.value(a).ndim:
        d = draw.dim(a)
        choices += [f"torch.{name}({a}, {d}" for name in ("sum", "sum", "prod", "amax", "amin", "any", "all", "cumsum", "argmax")]
        choices += [f"torch.cat([{a}, {a}], {d}", f"torch.stack([{a}, {a}], {d}", f"torch.cumprod({a}, {d}"]
    if draw.value(a).ndim == 2:
        choices += [f"torch.tril({a}", f"torch.mm({a}, {a}.mT"]
    return draw.one(choices)


def _leaves_views(draw: Draw, t: str, result: torch.Tensor) -> bool:
    """Whether PyTorch would give memory that others see another size, which dtorch refuses."""
    value, held = draw.value(t), draw.plain.tensors()
    if value.shape == result.shape or (result.numel() <= value.numel() and value.is_contiguous()):
        return False
    return any(u is not None and n != t and memory.of(u) == memory.of(value) for n, u in held.items())


def _spoils(draw: Draw, call: str, t: str) -> bool:
    """Whether PyTorch refuses the call, and only after it has resized or written to ``out=``."""
    value = draw.value(t)
    copy = value.clone()
    taken = _tried(f"{call}, out=copy)", {**draw.plain.names, "copy": copy}) is not None
    return not taken and not torch.equal(copy, value)


def _tried(text: str, names: dict[str, Any]) -> torch.Tensor | None:
    """What plain PyTorch makes of an expression, or None where it refuses."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return eval(text, names)
    except Exception:
        return None


def along(draw: Draw) -> None:
    """Scans and triangles in place."""
    t = draw.target(lambda t: t.ndim > 0)
    choices = [f"{t}.cumsum_({draw.dim(t)})"]
    if draw.value(t).ndim > 1:
        choices += [f"{t}.tril_({draw.between(-1, 1)})", f"{t}.triu_({draw.between(-1, 1)})"]
    if draw.value(t).ndim == 2:
        choices += [f"{t}.fill_diagonal_({draw.between(-3, 3)})"]
    draw.emit(draw.one(choices), results=0)


def reshape(draw: Draw) -> None:
    """Changes of the tensor's own shape. Autograd itself loses track of views of one that does so."""
    t = draw.tensor(lambda t: t.ndim > 0 and not t.requires_grad)
    choices = [f"{t}.transpose_({draw.dim(t)}, {draw.dim(t)})", f"{t}.unsqueeze_({draw.dim(t)})", f"{t}.squeeze_({draw.dim(t)})"]
    draw.emit(draw.one(choices), results=0, moves=True)


def random(draw: Draw) -> None:
    """Random numbers in place."""
    t = draw.target(lambda t: t.is_floating_point())
    name = draw.one(("normal_()", "uniform_()", "bernoulli_(0.5)", "random_(5)", "uniform_(-1, 1)"))
    draw.emit(f"{t}.{name}", results=0, rounds=True, seeds=True)


def data(draw: Draw) -> None:
    """Writes past autograd."""
    t = draw.target(lambda t: t.ndim > 0)
    draw.emit(f"{t}.{draw.one(('data', 'detach()'))}.{draw.one(('mul_', 'add_', 'fill_'))}({draw.number(t)})", results=0)


ROWS = (
    (6, simple),
    (8, paired),
    (7, set_item),
    (4, by_mask),
    (5, by_index),
    (3, out),
    (4, out_of_any_kind),
    (2, along),
    (1, reshape),
    (2, random),
    (1, data),
)
