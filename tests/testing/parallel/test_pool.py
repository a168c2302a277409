"""Cells in processes of their own: one that hangs or dies is recorded, and the others go on."""

from __future__ import annotations

from dtorch.testing.parallel.cell import parse_cell
from dtorch.testing.parallel.pool import records
from tests.testing.parallel.entries import answers


def test_what_dies_or_hangs_costs_one_cell() -> None:
    cells = [parse_cell(f"llama:dp={dp},tp={tp}") for dp, tp in ((1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (1, 3))]
    found = {record.cell: (record.kind, record.text) for record in records(cells, 2, 5.0, answers)}
    ends = {1: ("right", ""), 2: ("failed", "the process ended with 7"), 3: ("failed", "no end within 5 s")}
    assert found == {str(cell): ends[cell.size("dp")] for cell in cells}
