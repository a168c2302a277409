"""Cells in words: a table by model, the same as data, and the failures, each with its command."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .record import GOOD, KINDS, Record


def command(cell: str) -> str:
    """The command that runs one cell again."""
    return f"python -m dtorch.testing.parallel --cell {shlex.quote(cell)}"


def summary(records: Sequence[Record], seed: int, left_out: Mapping[str, str]) -> dict[str, Any]:
    """The run in numbers.

    Args:
        left_out: models that could not be built, each with the reason.
    """
    models = {name: _numbers([r for r in records if r.model == name]) for name in dict.fromkeys(r.model for r in records)}
    return {"seed": seed, "all": _numbers(records), "models": models, "left out": dict(left_out)}


def table(numbers: Mapping[str, Any]) -> str:
    """A summary as a Markdown table, one row for each model."""
    columns = ("cells", *KINDS, "forward", "backward", "seconds")
    rows = [["model", *columns]]
    for name, row in (*numbers["models"].items(), ("all", numbers["all"])):
        rows.append([name, *(f"{row[c]:.1e}" if c in ("forward", "backward") else f"{row[c]:g}" for c in columns)])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    left_out = [f"\n{name} left out: {why}" for name, why in numbers["left out"].items()]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:], *left_out])


def failures(records: Sequence[Record]) -> str:
    """What is neither right nor refused rightly, in Markdown."""
    lines = ["# Failures", ""]
    for r in records:
        if r.kind not in GOOD:
            lines += [f"## {r.kind}: {r.cell}", "", f"    {command(r.cell)}", "", "```", r.text, "```", ""]
    return "\n".join(lines)


def _numbers(records: Sequence[Record]) -> dict[str, Any]:
    kinds = Counter(r.kind for r in records)
    errors = {name: max((getattr(r, name) for r in records), default=0.0) for name in ("forward", "backward")}
    seconds = round(sum(r.seconds for r in records), 1)
    return {"cells": len(records), **{kind: kinds[kind] for kind in KINDS}, **errors, "seconds": seconds}
