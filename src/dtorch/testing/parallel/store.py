"""Results on disk: one JSON line for each finished cell."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from .record import Record

NAME = "results.jsonl"


class Store:
    """The results in a directory, of a run that may be interrupted and taken up again.

    Attributes:
        records: of the cells that are finished, by text; of a cell that was run twice, the later one.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / NAME
        directory.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        found = [Record(**json.loads(line)) for line in lines]
        self.records = {record.cell: record for record in found}

    def add(self, record: Record) -> None:
        """Keep a finished cell."""
        self.records[record.cell] = record
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(record)) + "\n")
