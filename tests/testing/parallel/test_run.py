"""A cell that is not right is told as what it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dtorch
from dtorch.testing.parallel import check, oracle, run
from dtorch.testing.parallel.cell import parse_cell
from dtorch.testing.parallel.record import FAILED, REFUSED, RIGHT, WRONG
from tests.models.zoo import ANY_RULE

pytestmark = ANY_RULE
MODEL = "llama"
TEXT = f"{MODEL}:tp=2:batch=2"


def kind_of(text: str) -> str:
    return run.run_cell(parse_cell(text)).kind


def test_right() -> None:
    record = check(TEXT)
    assert record.kind == RIGHT and 0 < record.forward <= run.FORWARD and 0 < record.backward <= run.BACKWARD


def test_more_stages_than_layers_are_refused() -> None:
    assert check("vit:pp=3").kind == check("vit:pp=2:virtual_stages=2").kind == REFUSED


def test_what_must_be_refused_and_is_not_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "impossible", lambda cell: True)
    with pytest.raises(AssertionError, match=f"{TEXT}: wrong: not refused"):
        check(TEXT)


def test_a_refusal_that_comes_late_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(module: Any, mesh: Any, **options: Any) -> None:
        dtorch.zeros(2, device_mesh=mesh)
        raise dtorch.UsageError("late")

    monkeypatch.setattr(run, "parallelize", late)
    record = run.run_cell(parse_cell("vit:pp=3"))
    assert record.kind == WRONG and "a session" in record.text


@pytest.mark.parametrize("of", ["logits", "gradients_of"])
def test_other_numbers_are_wrong(monkeypatch: pytest.MonkeyPatch, of: str) -> None:
    true = getattr(oracle, of)

    def other(module: Any, given: Any) -> Any:
        answer = true(module, given)
        return {k: v * 1.001 for k, v in answer.items()} if isinstance(answer, dict) else answer * 1.001

    oracle.answer(MODEL, parse_cell(TEXT).inputs())
    monkeypatch.setattr(oracle, of, other)
    assert kind_of(TEXT) == WRONG


def test_numbers_that_are_none_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    oracle.answer(MODEL, parse_cell(TEXT).inputs())
    true = oracle.logits
    monkeypatch.setattr(oracle, "logits", lambda *args: true(*args) * torch.nan)
    assert kind_of(TEXT) == WRONG


def test_a_gradient_on_one_side_only_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    oracle.answer(MODEL, parse_cell(TEXT).inputs())
    true = oracle.gradients_of
    monkeypatch.setattr(oracle, "gradients_of", lambda *args: dict.fromkeys(true(*args)))
    assert kind_of(TEXT) == WRONG


def test_an_error_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*args: Any, **options: Any) -> None:
        raise dtorch.UsageError("no such luck")

    monkeypatch.setattr(run, "parallelize", breaks)
    record = run.run_cell(parse_cell(TEXT))
    assert (record.kind, record.text) == (FAILED, "UsageError: no such luck")
