"""Products of groups: rows, columns or summed elements that belong to one matrix of several, as tokens do to experts.

A *ragged* dim holds the groups one after the other, and ``offs`` says where each ends. Where it is split, each piece has
what it holds of every group, so its own ends are the global ones, counted from its start and kept inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...core.spec import Spec
from ..builder import Builder, Value, Varying
from ..call import OpCall
from ..labels import Labels, PartialRow
from ..rule import Rule
from .compose import changed, named, sharded_on
from .lookup import varying

_aten = torch.ops.aten

FORMS: dict[tuple[int, int], tuple[str, str, str]] = {
    (2, 3): ("tk", "Gkn", "tn"),
    (3, 2): ("Gmk", "kt", "mt"),
    (2, 2): ("mt", "tn", "Gmn"),
    (3, 3): ("gmk", "gkn", "gmn"),
}
"""Subscripts by the numbers of dims of the factors; ``t`` is ragged, and ``G`` numbers its groups, which stay whole."""


@dataclass(frozen=True)
class Ragged(Labels):
    """Labels of a product with a ragged dim: ``(number of the input, dim)``, or None where there is none."""

    ragged: tuple[int, int] | None = None

    def steps(self, builder: Builder, call: OpCall, args: Any, kwargs: Any, outs: Sequence[Spec]) -> list[Value] | None:
        """The product with each piece's own ends; None where the ragged dim is whole."""
        if self.ragged is None:
            return None
        (number, dim), given = self.ragged, named(call, args, kwargs)
        split: Spec = (given["self"], given["mat2"])[number].spec
        if not sharded_on(split, [dim]):
            return None
        spec = varying(given["offs"].spec, tuple(a for a in split.sharding_axes(dim) if a in split.axes))

        def start(coord: tuple[int, ...]) -> int:
            return split.local_box(coord)[0][dim]

        def end(coord: tuple[int, ...]) -> int:
            return start(coord) + split.local_box(coord)[1][dim]

        inside = builder.local(_aten.clamp.default, [given["offs"], Varying(start), Varying(end)], {}, [spec])[0]
        own = builder.local(_aten.sub.Scalar, [inside, Varying(start)], {}, [spec])[0]
        return builder.local(call.func, *changed(call, args, kwargs, offs=own), outs)


def grouped(call: OpCall) -> Ragged | None:
    """``_grouped_mm``: linear in each factor; a summed dim, ragged or not, gives a partial sum."""
    a, b = call.arg("self"), call.arg("mat2")
    if call.arg("bias") is not None:
        return None
    first, second, out = FORMS[len(a.shape), len(b.shape)]
    rest = [[None] * len(s.shape) for s in call.specs[2:]]
    inner = next(c for c in first if c in second and c not in out)
    at = (0, first.index("t")) if "t" in first else (1, second.index("t")) if "t" in second else None
    partial = [PartialRow((*row, *(False,) * len(rest))) for row in ((True, False), (False, True))]
    dims = [[None if c == "G" else c for c in form] for form in (first, second, out)]
    return Ragged([*dims[:2], *rest], [dims[2]], {inner: "sum"}, partial, ragged=at)


TABLE = {"_grouped_mm": Rule(grouped)}
