"""The sweep in words: a table by operator, a summary, and the failures by what they have in common."""

from __future__ import annotations

import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from .record import BROKEN, LAYOUT, REFUSED, RIGHT, WAYS, WRONG, Failure, Record
from .settings import Settings
from .tables import INCOMPARABLE

_COLUMNS = (RIGHT, *WRONG, *REFUSED, LAYOUT)
_NUMBERS = re.compile(r"[-+]?\d[\d.]*(e[-+]?\d+)?")
_LISTS = re.compile(r"[\[(]#?[#, x]*[\])]")


def command(op: str, case: str, settings: Settings) -> str:
    """The command that runs one case again."""
    seed = f" --seed {settings.seed}" if settings.seed else ""
    return f"python -m dtorch.testing.opdb --only {shlex.quote(op)} --case {shlex.quote(case)}{seed}"


def table(records: Iterable[Record]) -> str:
    """A Markdown table, one row for each operator."""
    rows = [["operator", "verdict", *_COLUMNS, "planned", "by way", "replicated operators", "seconds"]]
    for r in sorted(records, key=lambda r: r.op):
        ways = ", ".join(f"{way} {r.ways[way]}" for way in reversed(WAYS) if r.ways[way])
        counts = [str(r.total(kind) or "") for kind in _COLUMNS]
        verdict = f"{r.verdict} ({r.status})" if r.status == "cut short" else r.verdict
        rows.append([r.op, verdict, *counts, r.planned, ways, _named(r.fallbacks), f"{r.seconds:.1f}"])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """The sweep in numbers."""
    verdicts = Counter(r.verdict for r in records)
    placed = [r for r in records if r.planned]
    fallback = [r for r in placed if r.planned == "replicated"]
    cases = Counter({kind: n for kind in _COLUMNS if (n := sum(r.total(kind) for r in records))})
    return {
        "operators": len(records),
        "verdicts": dict(verdicts.most_common()),
        "cases": sum(cases.values()),
        "cases by kind": dict(cases),
        "operators by kind": {kind: n for kind in _COLUMNS if (n := sum(bool(r.total(kind)) for r in records))},
        "not run": {r.op: _named(r.skipped) for r in records if r.verdict == "not run"},
        "cut short": sum(r.status == "cut short" for r in records),
        "values not compared": sorted(r.op for r in records if r.op in INCOMPARABLE),
        "sharded operators": len(placed),
        "with replicated fallback": len(fallback),
        "share with replicated fallback": round(len(fallback) / len(placed), 4) if placed else 0.0,
        "planned": dict(Counter(r.planned for r in placed).most_common()),
        "replicated operators": dict(Counter(name for r in placed for name in r.fallbacks).most_common()),
    }


def failures(records: Iterable[Record], settings: Settings) -> str:
    """Failures in Markdown, grouped by kind and by what was seen, numbers aside; the group of most operators first."""
    groups: dict[tuple[str, str], list[tuple[str, Failure]]] = defaultdict(list)
    for r in records:
        for f in r.failures:
            if f.kind != LAYOUT:
                groups[f.kind, _mechanism(f)].append((r.op, f))
    order = sorted(
        groups.items(), key=lambda item: (item[0][0] not in (*WRONG, *BROKEN), -len({op for op, _ in item[1]}), item[0])
    )
    return "\n".join(["# Failures", "", *(line for (kind, text), found in order for line in _group(kind, text, found, settings))])


def _named(counts: Counter[str]) -> str:
    return ", ".join(f"{name} ({n})" for name, n in counts.most_common())


def _group(kind: str, text: str, found: list[tuple[str, Failure]], settings: Settings) -> list[str]:
    ops = Counter(op for op, _ in found)
    op, first = min(found, key=lambda pair: (len(pair[1].case), pair[1].case))
    lines = [f"## {kind}: {len(ops)} operators, {len(found)} cases", "", f"`{text}`", "", _named(ops), ""]
    return [*lines, f"    {command(op, first.case, settings)}", "", f"    {first.text}", ""]


def _mechanism(failure: Failure) -> str:
    """What failures of one cause have in common: for wrong results the variant and dtype, else the error's text."""
    if failure.kind in WRONG:
        return failure.case.split(":")[0]
    return _LISTS.sub("(#)", _NUMBERS.sub("#", failure.text))[:160]
