"""The command itself: a quick run of one group writes figures that a program can read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks import report
from benchmarks.figure import Figure
from benchmarks.setting import Setting

ROOT = Path(__file__).parents[2]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m benchmarks`` in a process of its own: it starts a session, which this one may have already."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    command_line = [sys.executable, "-m", "benchmarks", *options]
    return subprocess.run(command_line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)


def test_a_quick_run_writes_valid_json(tmp_path: Path) -> None:
    file = tmp_path / "new" / "figures.json"
    done = run("--quick", "--only", "add", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "must reach" in done.stdout and "best known peer" in done.stdout
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    assert content["failed"] == {}
    assert content["machine"]["threads"] == 1 and content["machine"]["quick"] is True
    rows = {row["name"]: row for row in content["figures"]}
    assert sorted(rows) == ["add.client", "add.client_512", "add.client_64"]
    for row in rows.values():
        assert row["measured"] > 0 and row["limit"] > 0 and row["unit"] == "x"
        assert row["reached"] is (row["measured"] <= row["limit"])


def test_an_unknown_group_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(["--only", "nothing"])
    assert caught.value.code == 2
    assert "add" in capsys.readouterr().err


def test_one_broken_group_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(setting: Setting) -> Any:
        yield Figure(name="a.one", title="one", measured=1, limit=2)
        raise ValueError("no")

    monkeypatch.setattr(command, "GROUPS", {"a": breaks, "b": lambda s: [Figure(name="b.two", title="two", measured=3, limit=2)]})
    figures, failed = command.measure(["a", "b"], Setting())
    assert [f.name for f in figures] == ["a.one", "b.two"]
    assert failed == {"a": "ValueError: no"}


def test_the_table_tells_what_falls_short() -> None:
    near = Figure(name="a", title="near", measured=1.0, limit=2, spread=(0.9, 1.1), peer="3x")
    far = Figure(name="b", title="far", measured=4.5, limit=2, unit="ms")
    free = Figure(name="c", title="free", measured=12, limit=float("inf"), unit="plans")
    lines = report.table([near, far, free]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[2] == ["near", "1.00x (0.90-1.10)", "<= 2.00x", "ok", "3x"]
    assert cells[3] == ["far", "4.50 ms", "<= 2 ms", "short", "-"]
    assert cells[4] == ["free", "12 plans", "-", "ok", "-"]
    assert len({len(line) for line in lines}) == 1


def test_no_limit_is_null_in_json(tmp_path: Path) -> None:
    free = Figure(name="c", title="free", measured=12, limit=float("inf"))
    report.write_json(tmp_path / "f.json", {}, [free], {"x": "broke"})
    content = json.loads((tmp_path / "f.json").read_text(encoding="utf-8"))
    assert content["figures"][0]["limit"] is None and content["failed"] == {"x": "broke"}
