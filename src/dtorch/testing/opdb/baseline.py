"""A recorded result, and what has become worse since."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...core.errors import UsageError, four_parts
from .record import BROKEN, REFUSED, RIGHT, WAYS, WRONG, Record
from .settings import Settings


def write(path: Path, settings: Settings, records: Sequence[Record]) -> None:
    """Record a result: of each operator how it was planned and what failed; one that only passed takes one line."""
    header = json.dumps(settings.header())
    rows = [f"    {json.dumps(r.op)}: {json.dumps(_row(r))}" for r in sorted(records, key=lambda r: r.op)]
    path.write_text('{\n  "settings": ' + header + ',\n  "operators": {\n' + ",\n".join(rows) + "\n  }\n}\n", encoding="utf-8")


def regressions(path: Path, settings: Settings, records: Sequence[Record]) -> list[str]:
    """What is worse than recorded: more wrong cases, more failing ones, a process that ends, a worse way of planning.

    An operator that the record does not have must be right. Layout does not count.

    Raises:
        UsageError: recorded with other settings, which compare with nothing here.
    """
    recorded = json.loads(path.read_text(encoding="utf-8"))
    if recorded["settings"] != settings.header():
        given = f"settings {settings.header()}, where {path} was recorded with {recorded['settings']}"
        raise UsageError(
            four_parts(given, "only results of equal settings are compared", "--baseline", "record it anew with --record")
        )
    return [text for r in records for text in _worse(r, recorded["operators"].get(r.op, {}))]


def _row(record: Record) -> dict[str, Any]:
    row: dict[str, Any] = {"planned": record.planned}
    if record.status in BROKEN:
        row["status"] = record.status
    failing = {group: bad for group, kinds in record.counts.items() if (bad := _bad(kinds))}
    return {**row, "failing": failing} if failing else row


def _bad(kinds: dict[str, int]) -> dict[str, int]:
    return {kind: n for kind, n in kinds.items() if kind in (*WRONG, *REFUSED)}


def _worse(record: Record, before: dict[str, Any]) -> list[str]:
    found = []
    if record.status in BROKEN and before.get("status") not in BROKEN:
        found.append(f"{record.op}: {record.status} in {record.failures[0].case}")
    for group, kinds in record.counts.items():
        then, now = before.get("failing", {}).get(group, {}), _bad(kinds)
        for what, names in (("wrong", WRONG), ("failing", (*WRONG, *REFUSED))):
            was, is_now = (sum(row.get(kind, 0) for kind in names) for row in (then, now))
            if is_now > was:
                first = next(f for f in record.failures if f.kind in names and f.case.startswith(group))
                found.append(f"{record.op}: {group}: {is_now} cases {what}, recorded {was}; e.g. {first.case}: {first.text}")
    was_planned = before.get("planned") or RIGHT
    if was_planned in WAYS and record.planned and WAYS.index(record.planned) > WAYS.index(was_planned):
        found.append(f"{record.op}: planned by {record.planned}, recorded {was_planned}; {', '.join(record.fallbacks)}")
    return found
