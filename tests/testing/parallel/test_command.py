"""The command: results on disk, failures with their commands, and going on where it ended."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dtorch.testing.parallel import __main__ as command
from dtorch.testing.parallel.cell import Cell
from dtorch.testing.parallel.record import FAILED, RIGHT, Record
from tests.models.zoo import ANY_RULE

FILES = {"results.jsonl", "summary.json", "table.md", "failures.md"}


class Pool:
    """Stands for the processes: right for every cell but the first, until ``mended``."""

    def __init__(self) -> None:
        self.asked: list[Cell] = []
        self.mended = False

    def __call__(self, cells: Sequence[Cell], *args: Any) -> Iterator[Record]:
        for n, cell in enumerate(cells):
            self.asked.append(cell)
            good = n or self.mended
            yield Record(str(cell), RIGHT, forward=1e-6) if good else Record(str(cell), FAILED, "ValueError: no\nluck")


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    stand_in = Pool()
    monkeypatch.setattr(command, "records", stand_in)
    return stand_in


def test_results_and_failures(pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--models", "vit", "bert", "--cells", "3", "--seed", "4", "--out", str(tmp_path / "out")]
    assert command.main(given) == 1
    assert {p.name for p in (tmp_path / "out").iterdir()} == FILES
    numbers = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert numbers["seed"] == 4 and list(numbers["models"]) == ["vit", "bert"]
    assert (numbers["all"]["cells"], numbers["all"]["right"], numbers["all"]["failed"]) == (6, 5, 1)
    again = f"python -m dtorch.testing.parallel --cell {pool.asked[0]}"
    said = capsys.readouterr().out
    assert f"failed: ValueError: no\n    {again}\n" in said and "| bert | 3 | 3 | 0 | 0 | 0 | 1.0e-06 |" in said
    assert again in (tmp_path / "out" / "failures.md").read_text()


def test_it_goes_on_where_it_ended(pool: Pool, tmp_path: Path) -> None:
    given = ["--models", "vit", "--out", str(tmp_path)]
    assert command.main([*given, "--cells", "2"]) == 1
    assert command.main([*given, "--cells", "5"]) == 1
    assert len(pool.asked) == len(set(pool.asked)) == 5
    pool.mended = True
    assert command.main([*given, "--cells", "5", "--again"]) == 0
    assert len(pool.asked) == 7, "both that had failed"


@ANY_RULE
def test_one_cell(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--cell", "vit:dp=2:batch=2"]) == 0
    assert capsys.readouterr().out.startswith("vit:dp=2:batch=2: right, forward ")


def test_a_model_that_is_not_at_hand_is_left_out(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "missing", lambda name: "no package" if name == "smollm2" else "")
    pool.mended = True
    assert command.main(["--models", "vit", "smollm2", "--cells", "1", "--out", str(tmp_path)]) == 0
    assert "smollm2 left out: no package" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--models", "no_such_model"], ["--cell", "no_such_model:dp=2"], ["--cell", "vit"]])
def test_wrong_use_is_told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("parallel: ")
