"""Elementwise operators and changes of dtype."""

from __future__ import annotations

from ..draw import DTYPES, Draw

KEEP = [
    "neg",
    "abs",
    "sign",
    "relu",
    "square",
    "clone",
    "positive",
    "conj_physical",
    "relu6",
    "trunc",
    "isnan",
    "isfinite",
    "logical_not",
    "sgn",
]
ROUND = [
    "exp",
    "sin",
    "tanh",
    "sigmoid",
    "sqrt",
    "rsqrt",
    "log1p",
    "erf",
    "reciprocal",
    "angle",
    "cos",
    "atan",
    "asinh",
    "expm1",
    "nn.functional.gelu",
]
ROUND += ["nn.functional.silu", "nn.functional.softplus", "nn.functional.elu", "nn.functional.leaky_relu"]
PAIRED = ["add", "sub", "mul", "maximum", "minimum", "fmax", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_xor"]
PAIRED_EXACT = ["remainder", "floor_divide", "bitwise_and", "bitwise_or", "fmod", "heaviside"]
PAIRED_ROUND = ["div", "true_divide", "atan2", "hypot", "logaddexp", "copysign", "float_power"]
COMPARE = frozenset(
    [
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "logical_and",
        "logical_xor",
        "isnan",
        "isfinite",
        "logical_not",
        "sign",
        "sgn",
        "trunc",
        "relu6",
    ]
)


def unary(draw: Draw) -> None:
    """Of one tensor."""
    rounds = draw.chance(0.3)
    name = draw.one(ROUND if rounds else KEEP)
    t = draw.tensor(exact=name in COMPARE)
    draw.emit(f"torch.{name}({t})", rounds=rounds, moves=not rounds)


def binary(draw: Draw) -> None:
    """Of two that broadcast."""
    kind = draw.between(0, 9)
    name = draw.one(PAIRED if kind < 7 else PAIRED_EXACT if kind < 8 else PAIRED_ROUND)
    exact = name in COMPARE or kind == 7
    a = draw.tensor(lambda t: t.ndim < 5, exact)
    b = draw.partner(a, exact)
    a, b = draw.one(((a, b), (b, a)))
    draw.emit(f"torch.{name}({a}, {b})", rounds=kind > 7)


def with_number(draw: Draw) -> None:
    """Of a tensor and a number."""
    t = draw.tensor(exact=True)
    x = draw.number(t)
    choices = [
        f"{t} + {x}",
        f"{x} - {t}",
        f"{t} * {x}",
        f"{t} > {x}",
        f"{t} == {x}",
        f"{t} // 2",
        f"{t} % 3",
        f"-{t}",
        f"{t} ** 2",
    ]
    choices += [f"{t}.clamp(-2, {x})", f"torch.add({t}, {t}, alpha={x})", f"{t} != {x}", f"{t}.eq({x})", f"~{t}", f"{t} & 1"]
    draw.emit(draw.one(choices))


def where(draw: Draw) -> None:
    """A choice between two."""
    a = draw.tensor(lambda t: t.ndim < 5)
    b = draw.partner(a)
    shape = (draw.value(a).detach() + draw.value(b).detach()).shape
    c = draw.given(draw.into(shape), draw.one(DTYPES[3:5])) if draw.chance(0.5) else draw.partner(a, exact=True)
    text = draw.one(
        (
            f"torch.where({c} != 0, {a}, {b})",
            f"torch.where({c} > 0, {a}, {draw.number(a)})",
            f"{a}.masked_fill({c} > 0, {draw.number(a)})",
        )
    )
    draw.emit(text, moves=True)


def three(draw: Draw) -> None:
    """Fused products and sums."""
    a = draw.tensor(lambda t: t.ndim < 5)
    b, c = draw.partner(a), draw.partner(a)
    lerp = draw.chance(0.2)
    text = f"torch.lerp({a}, {b}, 0.25)" if lerp else f"torch.addcmul({a}, {b}, {c}, value={draw.between(-2, 2)})"
    draw.emit(text, rounds=lerp)


def dtype(draw: Draw) -> None:
    """Another dtype."""
    t = draw.tensor(exact=True)
    to = draw.one((*DTYPES, "float", "long", "as"))
    if to == "as":
        draw.emit(f"{t}.type_as({draw.tensor()})", moves=True)
    else:
        draw.emit(f"{t}.{to}()" if isinstance(to, str) else f"{t}.to({to})", moves=True)


ROWS = ((6, unary), (10, binary), (6, with_number), (3, where), (2, three), (4, dtype))
