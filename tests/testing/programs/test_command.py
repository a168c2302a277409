"""The command: figures, failing programs as scripts, processes that end."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from dtorch.testing.programs import batch, pool
from dtorch.testing.programs.__main__ import main
from dtorch.testing.programs.batch import STUCK, Report, Settings
from dtorch.testing.programs.program import Program
from dtorch.testing.programs.sides import Global


def test_the_command_prints_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--count", "3", "--seed", "5", "--jobs", "2"]) == 0
    said = capsys.readouterr()
    assert "programs 3 (seed 5): 0 mismatch, 0 unexpected error, 0 not refused, 0 crash or timeout" in said.out
    assert said.err == "3/3\n"


def test_failing_programs_are_printed_as_scripts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("dtorch.testing.programs.__main__.batches", _here)
    monkeypatch.setattr(batch, "numbered", lambda seed, number: WRONG)
    monkeypatch.setattr(Global, "move", lambda self, tensor, placements: tensor + 1)
    assert main(["--count", "1"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("# program 0: mismatch: b") and "check((2,)" in said and "programs 1 (seed 0): 1 mismatch" in said


WRONG = Program((2,), ("a = given((2,), torch.int64, 1, [Shard(0)])", "b = move(a, [Replicate()])"))


def _here(numbers: Any, settings: Settings, jobs: int) -> Any:
    yield batch.run_batch(numbers, settings)


def test_a_process_that_ends_costs_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_main", _ends_at_four)
    reports = list(pool.batches(range(2, 7), Settings(), 1))
    total = Report()
    for report in reports:
        total.add(report)
    assert total.programs == 5
    assert [(f.number, f.kind, f.text) for f in total.failures] == [(4, STUCK, "the process ended with -9")]


def _ends_at_four(numbers: Any, settings: Settings, at: Any, answer: Any) -> None:
    if 4 in numbers:
        at.value = 4
        os.kill(os.getpid(), signal.SIGKILL)
    answer.send(Report(programs=len(numbers)))
    answer.close()


def test_a_program_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(self: Global, *args: Any, **options: Any) -> Any:
        signal.pause()

    monkeypatch.setattr(Global, "given", waits)
    report = batch.run_batch([0], Settings(limit_s=0.2))
    assert [(f.kind, f.text) for f in report.failures] == [(STUCK, "no end within 0 s")]
