"""Texts of cells, and which are drawn."""

from __future__ import annotations

import pytest

from dtorch import UsageError
from dtorch.parallel.axes import MEANINGS
from dtorch.testing.parallel.cell import Cell, parse_cell
from dtorch.testing.parallel.draw import MOST_DEVICES, combinations, drawn


def test_a_text_names_its_cell() -> None:
    cell = parse_cell("llama:tp=3,dp=2:batch=7,zero=3")
    assert cell == Cell("llama", (("tp", 3), ("dp", 2)), (("batch", 7),))
    assert (str(cell), cell.devices, cell.option("zero"), cell.inputs()) == ("llama:tp=3,dp=2:batch=7", 6, 3, (7, 7))
    assert cell.mesh().axis_names() == ("tp", "dp")


@pytest.mark.parametrize("text", ["llama", "llama:", "llama:dp", "llama:dp=0", "llama:dp=2:speed=1", "llama:speed=2"])
def test_no_cell(text: str) -> None:
    with pytest.raises(UsageError):
        parse_cell(text)


def test_every_combination_comes_before_any_comes_again() -> None:
    every = combinations()
    cells = drawn("llama", len(every), seed=3)
    sizes = {tuple(cell.size(axis) for axis in MEANINGS) for cell in cells}
    assert sizes == {tuple(each.values()) for each in every}
    assert max(cell.devices for cell in cells) == MOST_DEVICES


def test_more_cells_of_a_seed_begin_with_fewer() -> None:
    many = drawn("vit", 300, seed=1)
    assert len(set(many)) == 300 and many[:20] == drawn("vit", 20, seed=1) != drawn("vit", 20, seed=2)
    assert all(parse_cell(str(cell)) == cell for cell in many)
