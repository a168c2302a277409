"""Placements: how a tensor lies along one mesh axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .errors import PlacementError, four_parts

REDUCE_OPS = ("sum", "avg", "max", "min", "prod")


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every device along the axis holds the same value."""

    def __repr__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True)
class Shard:
    """The tensor is split along ``dim`` over the axis.

    Without ``sizes`` the first ``n % k`` pieces are one longer, so no piece is empty while n >= k. ``sizes`` gives the
    local sizes explicitly; where an earlier mesh axis splits the same dim, it lists them for each of that axis'
    pieces in turn.

    Args:
        dim: tensor dim; negative counts from the end.
        sizes: local sizes along the axis, in elements.
    """

    dim: int
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.sizes is not None:
            object.__setattr__(self, "sizes", tuple(int(s) for s in self.sizes))

    def __repr__(self) -> str:
        return f"Shard({self.dim})" if self.sizes is None else f"Shard({self.dim}, sizes={self.sizes})"


@dataclass(frozen=True, slots=True)
class Partial:
    """Each device holds a part; the value is their reduction.

    Where several mesh axes are partial, the last one reduces first.

    Args:
        reduce_op: ``"sum"``, ``"avg"``, ``"max"``, ``"min"`` or ``"prod"``.
    """

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce_op not in REDUCE_OPS:
            raise PlacementError(
                four_parts(
                    f"Partial({self.reduce_op!r})",
                    f"a reduce op is one of {REDUCE_OPS}",
                    "Partial(reduce_op=...)",
                    "use one of these",
                )
            )

    def __repr__(self) -> str:
        return "Partial()" if self.reduce_op == "sum" else f"Partial({self.reduce_op!r})"


Placement = Replicate | Shard | Partial
Placements = tuple[Placement, ...]
REPLICATE = Replicate()


def balanced(n: int, k: int) -> tuple[int, ...]:
    """Split n elements over k pieces as evenly as can be, longer pieces first."""
    q, r = divmod(n, k)
    return (q + 1,) * r + (q,) * (k - r)


def starts(sizes: Sequence[int]) -> list[int]:
    """Where each piece begins when pieces of these sizes lie side by side."""
    out, at = [], 0
    for size in sizes:
        out.append(at)
        at += size
    return out
