"""The command, in processes of its own: reading PyTorch's database changes global state."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dtorch.testing.opdb.tables import INCOMPARABLE, LINEAR


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)


def opdb(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run("-m", "dtorch.testing.opdb", *arguments)


def test_the_tables_name_operators_of_the_database() -> None:
    done = run("-c", "from dtorch.testing.opdb.database import OPERATORS; print(*OPERATORS)")
    assert {*INCOMPARABLE, *LINEAR} <= set(done.stdout.split()), done.stderr
    assert len(INCOMPARABLE) <= 12


def test_a_sweep_writes_its_results_and_compares_them(tmp_path: Path) -> None:
    few = ("--only", "add", "nn.functional.pdist", "--samples", "1", "--combinations", "2", "--out", str(tmp_path / "out"))
    recorded = tmp_path / "recorded.json"
    done = opdb(*few, "--record", str(recorded))
    assert done.returncode == 0, done.stderr
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"results.jsonl", "summary.json", "table.md", "failures.md"}
    recorded.write_text(recorded.read_text().replace('"planned": "replicated"', '"planned": "rule"'))
    again = opdb(*few, "--baseline", str(recorded))
    assert again.returncode == 1 and "nn.functional.pdist: planned by replicated, recorded rule" in again.stdout


def test_one_case_runs_again() -> None:
    done = opdb("--only", "mm", "--case", "forward:float32:2x2:0:S0R,RP")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "mm forward:float32:2x2:0:S0R,RP: right; planned by rule"


@pytest.mark.parametrize("arguments", [("--only", "no_such_operator"), ("--only", "add", "--case", "forward")])
def test_wrong_use_is_told(arguments: tuple[str, ...]) -> None:
    done = opdb(*arguments)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("opdb: ")
