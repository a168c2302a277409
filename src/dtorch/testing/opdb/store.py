"""Results on disk: one JSON line for each finished operator, after one that tells the settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...core.errors import UsageError, four_parts
from .record import Record
from .settings import Settings

NAME = "results.jsonl"


class Store:
    """The results in a directory, of one sweep that may be interrupted and taken up again.

    Attributes:
        records: of the operators that are finished, by name.

    Raises:
        UsageError: the directory has results of other settings.
    """

    def __init__(self, directory: Path, settings: Settings) -> None:
        self.path = directory / NAME
        self.records: dict[str, Record] = {}
        directory.mkdir(parents=True, exist_ok=True)
        header = settings.header()
        if not self.path.exists():
            self._append(header)
            return
        first, *rest = [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]
        if first != header:
            given = f"settings {header}, where {self.path} has results of {first}"
            raise UsageError(four_parts(given, "results of one directory are comparable", "--out", "name another directory"))
        for data in rest:
            self.records[data["op"]] = Record.from_json(data)

    def add(self, record: Record) -> None:
        """Keep a finished operator."""
        self.records[record.op] = record
        self._append(record.to_json())

    def _append(self, data: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(data) + "\n")
