"""Seeing and steering communication: ``explain()`` and ``communication()``."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable

import pytest
import torch

import dtorch
from dtorch import CommunicationForbidden, Partial, Replicate, Shard, UsageError, communication, explain, init_device_mesh
from dtorch.tensor import watch
from tests.sharding.harness import place, values

R = Replicate()
MESH = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def here() -> str:
    """``file:line`` of the caller."""
    frame = inspect.currentframe().f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def rows() -> dtorch.Tensor:
    return place(values(4, 4), MESH, (Shard(0), R))


def test_each_collective_is_listed_with_its_line() -> None:
    x = place(values(4, 4), MESH, (Shard(0), Partial()))
    with explain() as report:
        y = x.redistribute(placements=[Shard(0), R]); line = here()  # fmt: skip  # noqa: E702
        z = (y @ place(values(4, 4), MESH, (R, Shard(0)))).exp()
    (first, *rest) = report.events
    assert (first.comm.kind, first.comm.axis, first.comm.nbytes) == ("all_reduce", "tp", 2 * 16 * 4)
    assert (first.comm.before, first.comm.after) == ("[Shard(0), Partial()]", "[Shard(0), Replicate()]")
    assert first.site.startswith(line) and "test_each_collective_is_listed_with_its_line" in first.site
    assert rest and all(__file__ in e.site for e in rest)
    assert report.nbytes == sum(e.comm.nbytes for e in report.events)
    assert report.by_axis()["tp"][0] == sum(e.comm.axis == "tp" for e in report.events)
    text = str(report)
    assert text.count("\n") + 1 == len(report.events) and "all_reduce" in text and line in text
    assert z.shape == (4, 4)


def test_no_communication_is_said_so() -> None:
    x = rows()
    with explain() as report:
        (x * 2 + 1).relu().sum(1)
    assert report.events == [] and str(report) == "no communication" and report.nbytes == 0


def test_communication_in_backward_is_listed_with_the_backward_line() -> None:
    w = place(values(4, 4), MESH, (R, R)).requires_grad_()
    x = place(values(6, 4), MESH, (Shard(0), R))
    loss = (x @ w).exp().sum().redistribute(placements=[R, R])
    with explain() as report:
        loss.backward(); line = here()  # fmt: skip  # noqa: E702
        w.grad.redistribute(placements=[R, R])
    assert report.events and any(e.site.startswith(line) or __file__ in e.site for e in report.events)


def test_reports_nest_and_end() -> None:
    x = rows()
    with explain() as outer:
        x.redistribute(placements=[R, R])
        with explain() as inner:
            x.redistribute(placements=[R, R])
    x.redistribute(placements=[R, R])
    assert (len(outer.events), len(inner.events)) == (2, 1)
    with pytest.raises(ValueError), explain() as broken:
        raise ValueError
    x.redistribute(placements=[R, R])
    assert broken.events == []


def test_explaining_tells_cached_plans_too() -> None:
    x = place(values(4, 4), MESH, (Shard(0), R))
    for _ in range(2):
        with explain() as report:
            x @ x
        assert report.events


def test_forbid_refuses_implicit_communication_and_names_it() -> None:
    x = rows()
    with communication("forbid"):
        (x * 2).relu().sum(1)
        x.redistribute(placements=[R, R]).to_torch()
        x.sum().item()
        with pytest.raises(CommunicationForbidden) as raised:
            x.softmax(0) @ x
        (x + 1).to_torch()
    text = str(raised.value)
    assert __file__ in text and "bytes" in text and "dp" in text
    assert [line.split(":")[0].strip() for line in text.splitlines()][1:] == ["rule", "where", "to do"]
    torch.testing.assert_close((x.softmax(0) @ x).to_torch(), values(4, 4).softmax(0) @ values(4, 4))


def test_warn_says_what_and_where() -> None:
    x = rows()
    with communication("warn"), pytest.warns(RuntimeWarning, match=r"aten::mm.* communicates: all_gather over dp") as caught:
        x @ x
    assert caught[0].filename == __file__


def test_a_warning_names_the_line_that_communicates() -> None:
    x = dtorch.ones(4, 4, device_mesh=init_device_mesh("cpu", 2), placements=[Shard(1)])
    with pytest.warns(RuntimeWarning, match="all_reduce") as caught, communication("warn"):
        torch.relu(x.sum(1)); line = here()  # fmt: skip  # noqa: E702
    assert [f"{w.filename}:{w.lineno}" for w in caught] == [line]


def test_modes_nest_and_come_back() -> None:
    x = rows()
    with communication("forbid"):
        with communication("allow"):
            x @ x
        with pytest.raises(CommunicationForbidden):
            x @ x
    x @ x
    with pytest.raises(UsageError, match="allow"):
        communication("sometimes").__enter__()


def test_a_missing_rule_is_told_once_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_told", set())
    x = rows()
    with explain() as report, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            torch.nn.functional.pdist(x)
    assert len(caught) == 1 and "no sharding rule" in str(caught[0].message) and caught[0].filename == __file__
    assert sum(report.replicated.values()) == 3
    assert "ran replicated 3 times" in str(report)


def test_an_unsplit_operand_never_counts_as_replicated() -> None:
    x = dtorch.ones(4, 4, device_mesh=MESH)
    with explain() as report, communication("forbid"):
        torch.nn.functional.pdist(x)
    assert not report.replicated


WAYS = [
    (torch.tanh, set()),
    (lambda x: torch.softmax(x, 0), {"program"}),
    (torch.nn.functional.glu, {"decomposition"}),
    (torch.nn.functional.pdist, {"replicated"}),
    (torch.nonzero, {"replicated"}),
]


@pytest.mark.filterwarnings("ignore:.*has no sharding rule:RuntimeWarning")
@pytest.mark.parametrize(("program", "ways"), WAYS)
def test_the_ways_beside_a_rule_are_told(program: Callable[[torch.Tensor], torch.Tensor], ways: set[str]) -> None:
    x = dtorch.Tensor(torch.eye(6), device_mesh=init_device_mesh("cpu", 3), placements=[Shard(0)])
    with explain() as report:
        program(x)
    assert {way for _, way in report.ways} == ways


def test_reports_in_one_another_each_see_all() -> None:
    x = dtorch.ones(4, device_mesh=dtorch.init_device_mesh("cpu", 2), placements=[dtorch.Shard(0)])
    with dtorch.explain() as outer:
        with dtorch.explain() as inner:
            x.cumsum(0).to_torch()
        x.to_torch()
    assert len(outer.events) == len(inner.events) + 1
