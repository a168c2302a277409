"""Gradients of a random scalar."""

from __future__ import annotations

from ..draw import Declined, Draw


def gradients(draw: Draw) -> None:
    """Gradients of some tensors with respect to some inputs."""
    outs = draw.names(lambda t: t.requires_grad and not t.is_leaf)
    leaves = draw.names(lambda t: t.requires_grad)
    if not outs or not leaves:
        raise Declined
    outs = draw.random.sample(outs, min(len(outs), draw.between(1, 3)))
    leaves = draw.random.sample(leaves, min(len(leaves), draw.between(1, 2)))
    draw.emit(
        f"grads([{', '.join(outs)}], [{', '.join(leaves)}])" + ("[0]" if len(leaves) == 1 else ""),
        results=len(leaves),
        rounds=True,
    )


def backward(draw: Draw) -> None:
    """``backward``, and what it leaves in ``grad``."""
    outs = draw.names(lambda t: t.requires_grad and not t.is_leaf and t.is_floating_point())
    leaves = draw.names(lambda t: t.requires_grad and t.is_leaf)
    if not outs or not leaves:
        raise Declined
    draw.emit(f"{draw.one(outs)}.sum().backward()", results=0, rounds=True)
    leaf = draw.one(leaves)
    if draw.value(leaf).grad is not None:
        draw.emit(f"{leaf}.grad.clone()", rounds=True)


def ask(draw: Draw) -> None:
    """A tensor that is followed from here on."""
    t = draw.tensor(lambda t: t.is_leaf and (t.is_floating_point() or t.is_complex()))
    draw.emit(f"{t}.requires_grad_()", results=0, moves=True)


ROWS = ((9, gradients), (2, backward), (2, ask))
