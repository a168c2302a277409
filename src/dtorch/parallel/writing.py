"""How plans and layouts are written down: tables, shapes, bytes, and placements as text."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from ..core.errors import UsageError, four_parts
from ..core.placements import Partial, Placement, Replicate, Shard


def table(rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Lines of a table, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [(indent + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True))).rstrip() for row in rows]


def times(shape: Sequence[int]) -> str:
    """A shape as ``2x3``."""
    return "x".join(map(str, shape)) or "scalar"


def size(nbytes: int) -> str:
    """A number of bytes with a unit: ``1.5 MiB``."""
    number, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if number < 1024:
            break
        number, unit = number / 1024, larger
    return f"{number:.4g} {unit}"


def placement_named(text: str) -> Placement:
    """The placement that ``repr`` writes so, e.g. ``Shard(0, sizes=(2, 1))``.

    Raises:
        UsageError: it writes none.
    """
    try:
        call = ast.parse(text, mode="eval").body
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            args = [ast.literal_eval(a) for a in call.args]
            named = {k.arg or "": ast.literal_eval(k.value) for k in call.keywords}
            return KINDS[call.func.id](*args, **named)
    except (SyntaxError, KeyError, TypeError, ValueError) as error:
        raise _unreadable(text) from error
    raise _unreadable(text)


def _unreadable(text: str) -> UsageError:
    return UsageError(
        four_parts(
            f"placement {text!r}",
            f"a placement is written as one of {list(KINDS)} with its arguments",
            "a plan as text",
            "write e.g. 'Shard(0)'",
        )
    )


KINDS: dict[str, type[Shard] | type[Replicate] | type[Partial]] = {"Shard": Shard, "Replicate": Replicate, "Partial": Partial}
