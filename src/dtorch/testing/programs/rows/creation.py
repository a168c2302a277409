"""New tensors: inputs, factories, ``*_like``, and random numbers with a seed."""

from __future__ import annotations

import torch

from ..draw import DTYPES, Draw


def fresh(draw: Draw) -> None:
    """One more input."""
    draw.given()


def factory(draw: Draw) -> None:
    """Factory functions with placements."""
    shape, dtype = draw.shape(), draw.one(DTYPES)
    n = draw.size()
    name, arguments, made, to = draw.one(
        (
            ("zeros", f"{shape}", shape, dtype),
            ("ones", f"{shape}", shape, dtype),
            ("full", f"{shape}, {draw.between(-3, 3)}", shape, dtype),
            ("arange", f"{n}", (n,), torch.int64),
            ("eye", f"{n}, 3", (n, 3), torch.float32),
        )
    )
    draw.emit(f"make({name!r}, {arguments}, dtype={to}, placements={draw.placements(made, to)})")


def like(draw: Draw) -> None:
    """``*_like`` and ``new_*``."""
    t, x = draw.tensor(), draw.between(-3, 3)
    dtype = f", dtype={draw.one(DTYPES)}" if draw.chance(0.3) else ""
    choices = [f"torch.zeros_like({t}{dtype})", f"torch.ones_like({t}{dtype})", f"torch.full_like({t}, {x}{dtype})"]
    choices += [f"torch.empty_like({t}{dtype}).fill_(1)", f"{t}.new_zeros({draw.shape()})", f"{t}.new_full({draw.shape()}, {x})"]
    draw.emit(draw.one(choices), moves=True)


def random(draw: Draw) -> None:
    """Random numbers after a seed."""
    t, shape = draw.tensor(lambda t: t.is_floating_point()), draw.shape()
    text, whole = draw.one(
        (
            (f"torch.rand_like({t})", False),
            (f"torch.randn_like({t})", False),
            (f"torch.randint_like({t}, 5)", True),
            (f"torch.nn.functional.dropout({t}, 0.5)", True),
            (f"torch.rand_like({t}).bernoulli(0.5)", True),
            (f"make('randint', -3, 4, {shape}, placements={draw.placements(shape, torch.int64)})", True),
            (f"make('randn', {shape}, placements={draw.placements(shape, torch.float32)})", False),
        )
    )
    draw.emit(text, rounds=not whole, seeds=True)


ROWS = ((5, fresh), (4, factory), (4, like), (3, random))
