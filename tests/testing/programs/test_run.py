"""What running a program tells: mismatches, errors, lines that should be refused, rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtorch.testing.programs import check
from dtorch.testing.programs.batch import numbered
from dtorch.testing.programs.program import Program, defined, operators, used
from dtorch.testing.programs.run import ACCEPTED, ERROR, WRONG, run
from dtorch.testing.programs.shake import explained
from dtorch.testing.programs.shrink import reduced, shrunk
from dtorch.testing.programs.sides import Global

GIVEN = "a = given((2, 3), torch.float32, 1, [Shard(1, sizes=(1, 2)), Partial('max')])"


def _program(*lines: str) -> Program:
    return Program((2, 2), (GIVEN, *lines))


def _moved_wrongly(self: Global, tensor: Any, placements: Any) -> Any:
    return tensor + 1


def test_a_right_program_runs() -> None:
    outcome = run(_program("b = a.sum(0)", "look()", "a[0] = 2", "b.add_(1)"))
    assert (outcome.failure, outcome.ran, outcome.refused) == (None, 4, 0)


def test_a_refused_line_is_left_out_and_the_program_goes_on() -> None:
    outcome = run(_program("b = a @ a", "c = a + 1", "d = a[torch.tensor([7])]", "e = c * 2"))
    assert (outcome.failure, outcome.ran, outcome.refused) == (None, 3, 2)


def test_a_mismatch_is_found_and_cut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Global, "move", _moved_wrongly)
    program = _program("b = a.t()", "c = b * 2", "d = move(b, [Replicate(), Replicate()])", "e = d + c")
    failure = run(program).failure
    assert failure is not None and failure.kind == WRONG
    small = shrunk(program, failure)
    assert len(small.mesh) == 1
    assert small.lines[0] == "a = given((2, 3), torch.float32, 1, [Replicate()])"
    assert [line[:1] for line in small.lines] == ["a", "b", "d"]
    with pytest.raises(AssertionError, match=r"mismatch after `look\(\)`: d"):
        exec(small.script())


def test_an_unexpected_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Global, "move")
    monkeypatch.setattr(Global, "move", lambda self, tensor, placements: tensor.nothing, raising=False)
    failure = run(_program("b = move(a, [Replicate(), Replicate()])")).failure
    assert failure is not None and (failure.kind, failure.line) == (ERROR, 1)


def test_what_is_not_refused_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Global, "make", lambda self, *args, **options: self.names["a"])
    failure = run(_program("b = make('zeros', -1, placements=[Replicate(), Replicate()])")).failure
    assert failure is not None and (failure.kind, failure.line) == (ACCEPTED, 1)


def test_rounding_is_told_from_errors() -> None:
    lines = ("a = given((9,), torch.bfloat16, 3, [Replicate()])", "b = (a / 3).exp()", "c = b.sum()", "d = c - c.floor()")
    names: dict[str, Any] = {"torch": torch}
    exec("\n".join(lines).replace("given((9,), torch.bfloat16, 3, [Replicate()])", "torch.zeros(9)"), names)
    side = run(Program((2,), lines))
    assert side.failure is None
    right = _values(lines)
    assert explained(lines, {"c": right["c"] * (1 + 2**-7), "b": right["b"]}) == []
    assert explained(lines, {"c": right["c"] * 2, "a": right["a"] + 1}) == ["c", "a"]


def _values(lines: tuple[str, ...]) -> dict[str, torch.Tensor]:
    side = Global((1,))
    for line in lines:
        side.run(line)
    return {name: t.to_torch() for name, t in side.tensors().items()}


def test_lines_tell_what_they_define_and_use() -> None:
    assert defined("t1, t2 = t0.sort(dim=0)") == ("t1", "t2")
    assert used("t1[t0 > 0] = t2") == {"t0", "t1", "t2"} and defined("t1[t0 > 0] = t2") == ()
    assert operators("t1 = torch.add(t0[1:], t0) * 2") == ["add", "[]", "mult"]


def test_a_line_goes_with_what_needs_it() -> None:
    program = Program((2,), ("a = 1", "b = a", "c = b", "d = 2"))
    assert reduced(program, lambda p: "d = 2" in p.lines).lines == ("d = 2",)
    assert reduced(program, lambda p: "c = b" in p.lines).lines == ("a = 1", "b = a", "c = b")


def test_a_number_always_gives_the_same_program() -> None:
    assert numbered(3, 7) == numbered(3, 7) != numbered(3, 8)


def test_check_takes_text() -> None:
    check((3,), "a = given((4,), torch.int64, 1, [Shard(0)])\nb = a.cumsum(0)")
