"""The sweep sees what is wrong: each kind of fault is put in, and found under its name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dtorch
from dtorch.sharding import table
from dtorch.sharding.labels import Labels, PartialRow
from dtorch.sharding.rule import Rule
from dtorch.tensor import dispatch
from dtorch.testing.opdb.cases import parse_case
from dtorch.testing.opdb.record import RIGHT, Record
from dtorch.testing.opdb.run import run_case, run_operator
from dtorch.testing.opdb.settings import Settings
from tests.testing.opdb.entries import Entry

SETTINGS = Settings(combinations=6)


@pytest.fixture
def plan_anew() -> Any:
    """No plan is kept from before, and none is left over."""
    dtorch.shutdown()
    table.rule_for.cache_clear()
    dispatch._operators.clear()
    yield
    dtorch.shutdown()
    table.rule_for.cache_clear()
    dispatch._operators.clear()


def instead(monkeypatch: pytest.MonkeyPatch, name: str, rule: Rule) -> None:
    """Put a row in place of an operator's own."""
    monkeypatch.setattr(table, "FAMILIES", ({name: rule}, *table.FAMILIES))


def kinds(record: Record) -> dict[str, set[str]]:
    """What was found, by variant."""
    return {group.split(":")[0]: set(row) for group, row in record.counts.items()}


def test_a_right_operator_is_right_in_every_variant() -> None:
    entry = Entry("tanh", torch.tanh, inplace=torch.tanh_, supports_out=True)
    record = run_operator(entry, SETTINGS)
    assert kinds(record) == {v: {RIGHT} for v in ("forward", "backward", "inplace", "inplace_backward", "out")}
    assert record.verdict == RIGHT and record.planned == "rule" and record.failures == []
    # Two samples on three meshes; a vector of (2, 4) placements has more combinations than are drawn on 2x2 alone.
    assert record.counts["forward:float32"].total() == 2 * (3 + 3 + 6)


def test_a_wrong_row_is_a_wrong_value(monkeypatch: pytest.MonkeyPatch, plan_anew: None) -> None:
    instead(monkeypatch, "_softmax", Rule(lambda call: Labels(["ij"], ["ij"])))
    entry = Entry("softmax", lambda x: torch.softmax(x, 1), supports_autograd=False)
    record = run_operator(entry, SETTINGS)
    assert kinds(record) == {"forward": {RIGHT, "wrong value"}} and record.verdict == "wrong"
    assert all("S1" in f.case for f in record.failures)
    (again,) = run_case(entry, parse_case(record.failures[0].case), SETTINGS).failures
    assert again == record.failures[0]


def test_a_partial_input_taken_for_linear_is_a_wrong_value(monkeypatch: pytest.MonkeyPatch, plan_anew: None) -> None:
    instead(monkeypatch, "abs", Rule(lambda call: Labels(["ij"], ["ij"], partial=[PartialRow((True,))])))
    # The name is that of a linear operator, so partial inputs are tried.
    record = run_operator(Entry("neg", torch.abs, supports_autograd=False), SETTINGS)
    assert record.failures and all("P" in f.case for f in record.failures)
    assert {f.kind for f in record.failures} == {"wrong value"}


def test_a_wrong_row_of_a_backward_operator_is_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch, plan_anew: None) -> None:
    instead(monkeypatch, "_softmax_backward_data", Rule(lambda call: Labels(["ij", "ij"], ["ij"])))
    record = run_operator(Entry("softmax", lambda x: torch.softmax(x, 1)), SETTINGS)
    assert kinds(record) == {"forward": {RIGHT}, "backward": {RIGHT, "gradient wrong"}}


def test_a_refusal_is_recorded_with_its_text(monkeypatch: pytest.MonkeyPatch, plan_anew: None) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("no tangents today")

    monkeypatch.setitem(dispatch.HANDLERS, torch.ops.aten.tan.default, refuse)
    record = run_operator(Entry("tan", torch.tan), SETTINGS)
    assert kinds(record) == {"forward": {"refused"}, "backward": {"refused"}} and record.verdict == "refused"
    assert record.failures[0].text == "RuntimeError: no tangents today"
    assert not record.ways


def test_a_refused_gradient_is_told_from_a_refused_operator(monkeypatch: pytest.MonkeyPatch, plan_anew: None) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("one way only")

    monkeypatch.setitem(dispatch.HANDLERS, torch.ops.aten.tanh_backward.default, refuse)
    record = run_operator(Entry("tanh", torch.tanh), SETTINGS)
    assert kinds(record) == {"forward": {RIGHT}, "backward": {"gradient refused"}}


def test_a_lost_write_is_a_wrong_value(monkeypatch: pytest.MonkeyPatch, plan_anew: None) -> None:
    monkeypatch.setitem(dispatch.HANDLERS, torch.ops.aten.neg_.default, lambda cls, func, args, kwargs: args[0])
    record = run_operator(Entry("neg", torch.neg, inplace=torch.neg_, supports_autograd=False), SETTINGS)
    assert kinds(record) == {"forward": {RIGHT}, "inplace": {"wrong value"}}


def test_how_it_was_planned_is_the_worst_of_its_parts() -> None:
    fallback = run_operator(Entry("pdist", lambda x: torch.nn.functional.pdist(x).neg(), supports_autograd=False), SETTINGS)
    assert fallback.planned == "replicated" and list(fallback.fallbacks) == ["aten::_pdist_forward.default"]
    program = run_operator(Entry("softmax", lambda x: torch.softmax(x, 1), supports_autograd=False), SETTINGS)
    assert program.planned == "program" and program.ways["rule"]


def test_random_numbers_are_those_of_plain_pytorch() -> None:
    record = run_operator(Entry("dropout", lambda x: torch.nn.functional.dropout(x, 0.5)), SETTINGS)
    assert record.verdict == RIGHT and record.total() > 20


def test_a_factory_runs_on_the_mesh() -> None:
    entry = Entry("arange", lambda x=None: torch.arange(7), shapes=(), supports_autograd=False)
    entry.sample_inputs = lambda *_, **__: iter([_no_tensor()])
    record = run_operator(entry, SETTINGS)
    assert record.counts == {"forward:float32": {RIGHT: 3}}


def _no_tensor() -> Any:
    (sample,) = Entry("", torch.neg, shapes=(((1,),),)).sample_inputs("cpu", torch.float32)
    sample.input = None
    return sample


def test_what_plain_pytorch_refuses_is_skipped_and_counted() -> None:
    record = run_operator(Entry("cholesky", lambda x: torch.linalg.cholesky(x)), SETTINGS)
    assert not record.counts and record.verdict == "not run"
    assert sum(n for reason, n in record.skipped.items() if reason.startswith("plain ")) == 4


def test_other_dtypes_run_replicated_and_split_once() -> None:
    dtypes = (torch.float32, torch.int64, torch.bool)
    record = run_operator(Entry("clone", torch.clone, dtypes=dtypes), SETTINGS)
    assert record.counts["forward:int64"].total() == record.counts["forward:bool"].total() == 2 * 3 * 2
    assert not any(group.startswith("backward:int") for group in record.counts)


def test_time_that_runs_out_is_told() -> None:
    record = run_operator(Entry("neg", torch.neg), Settings(limit_s=0.0))
    assert record.status == "cut short" and record.total() == 1


def test_partial_is_tried_on_inputs_of_linear_operators_and_never_on_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    run_operator(Entry("neg", torch.neg, supports_out=True), Settings(combinations=99), seen.append)
    inputs = {case.rsplit(":")[-1].split(",")[0] for case in seen}
    assert {"R", "P", "S0", "S1", "PP", "S0P"} <= inputs
    assert not any("P" in case.rsplit(":")[-1].split(",")[1] for case in seen if case.startswith("out"))
    run_operator(Entry("tanh", torch.tanh), Settings(combinations=99), seen.clear() or seen.append)
    assert not any("P" in case for case in seen)


@pytest.mark.parametrize("text", ["forward:float32:3:9:R", "forward:float32:3:0:R,R", "forward:float32:2x2:0:R"])
def test_a_case_that_the_operator_has_not_is_refused(text: str) -> None:
    with pytest.raises(dtorch.UsageError, match="copy it from a failure"):
        run_case(Entry("neg", torch.neg), parse_case(text), SETTINGS)


@pytest.mark.parametrize(("scale", "verdict"), [(1.0, "wrong"), (1e4, RIGHT)])
def test_rounding_is_no_error_where_plain_pytorch_rounds_alike(scale: float, verdict: str) -> None:
    def off(x: torch.Tensor) -> torch.Tensor:
        # At 1e4 the sine's argument is known to some thousandths.
        y = torch.sin(x * scale)
        return y + 1e-3 if isinstance(x, dtorch.Tensor) else y

    assert run_operator(Entry("sin", off, supports_autograd=False), SETTINGS).verdict == verdict
