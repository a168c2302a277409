"""Schedules as data: every unit once, in an order that can be run, with the bubbles and the memory that theory says."""

from __future__ import annotations

from itertools import product

import pytest

from dtorch import UsageError
from dtorch.parallel.pipeline.clock import Timeline, draw, simulate
from dtorch.parallel.pipeline.schedule import Backward, Forward, Schedule, Unit, make_schedule

KINDS = [("gpipe", 1), ("1f1b", 1), ("gpipe", 2), ("interleaved", 2), ("interleaved", 3), ("interleaved", 4)]
SIZES = [*product(range(1, 7), range(1, 20))]


def duration(chunks: int) -> dict[type, float]:
    """A backward unit takes twice a forward one; a device's chunks together take as long as one stage would."""
    return {Forward: 1 / chunks, Backward: 2 / chunks}


def timed(schedule: Schedule, chunks: int, transfer: float = 0.0) -> Timeline:
    times = duration(chunks)
    return simulate(schedule, lambda unit: times[type(unit)], transfer)


@pytest.mark.parametrize(("name", "chunks"), KINDS)
@pytest.mark.parametrize("backward", [True, False])
def test_every_unit_is_run_once_and_after_what_it_needs(name: str, chunks: int, backward: bool) -> None:
    for devices, m in SIZES:
        schedule = make_schedule(name, devices, m, chunks, backward)
        kinds = (Forward, Backward) if backward else (Forward,)
        expected = {kind(k, i) for kind in kinds for k in range(devices * chunks) for i in range(m)}
        assert len(schedule.order) == len(expected) and set(schedule.order) == expected
        at = {unit: n for n, unit in enumerate(schedule.order)}
        assert all(at[need] < at[unit] for unit in schedule.order for need in schedule.needs(unit))


@pytest.mark.parametrize(("name", "chunks"), KINDS)
def test_the_order_of_all_is_that_of_each_device(name: str, chunks: int) -> None:
    for devices, m in SIZES:
        schedule = make_schedule(name, devices, m, chunks)
        for device, units in enumerate(schedule.devices):
            assert tuple(u for u in schedule.order if u.stage % devices == device) == units


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_is_what_the_formula_says(name: str) -> None:
    for p, m in SIZES:
        timeline = timed(make_schedule(name, p, m), 1)
        for device in range(p):
            assert timeline.bubble(device) == pytest.approx((p - 1) / (m + p - 1)), (p, m)


@pytest.mark.parametrize("v", [2, 3, 4])
def test_chunks_divide_the_bubble(v: int) -> None:
    for p, m in SIZES:
        if m >= p:
            timeline = timed(make_schedule("interleaved", p, m, v), v)
            for device in range(p):
                assert timeline.bubble(device) == pytest.approx((p - 1) / (v * m + p - 1)), (p, m)


def test_forward_alone_has_the_same_bubble() -> None:
    for p, m in SIZES:
        assert timed(make_schedule("1f1b", p, m, backward=False), 1).bubble(0) == pytest.approx((p - 1) / (m + p - 1))


def test_what_is_kept_of_activations() -> None:
    for p, m in SIZES:
        for device in range(p):
            assert make_schedule("gpipe", p, m).alive(device) == m
            assert make_schedule("1f1b", p, m).alive(device) == min(m, p - device)


@pytest.mark.parametrize("v", [2, 3])
def test_interleaved_keeps_fewer_than_all(v: int) -> None:
    for p in range(2, 6):
        schedule = make_schedule("interleaved", p, 8 * p, v)
        assert [schedule.alive(d) for d in range(p)] == [2 * (p - 1 - d) + (v - 1) * p + 1 for d in range(p)]


def test_transfers_are_waited_for() -> None:
    schedule = make_schedule("gpipe", 3, 1)
    assert timed(schedule, 1).makespan == 9
    assert timed(schedule, 1, transfer=0.5).makespan == 9 + 4 * 0.5
    alone = make_schedule("gpipe", 1, 3, 2)
    assert timed(alone, 2, transfer=0.5).makespan == timed(alone, 2).makespan, "within a device nothing is sent"


def test_transfers_between_steady_stages_are_hidden() -> None:
    schedule = make_schedule("gpipe", 2, 50, backward=False)
    assert timed(schedule, 1, transfer=0.5).makespan == 51.5


def test_what_a_device_sends_is_asked_for_before_its_next_unit() -> None:
    order = make_schedule("gpipe", 2, 3, backward=False).order
    assert order == (Forward(0, 0), Forward(1, 0), Forward(0, 1), Forward(1, 1), Forward(0, 2), Forward(1, 2))


def test_a_forward_is_no_backward() -> None:
    units: set[Unit] = {Forward(0, 0), Backward(0, 0)}
    assert len(units) == 2


def test_the_picture() -> None:
    assert draw(make_schedule("1f1b", 2, 3)).splitlines() == [
        "1f1b: 3 micro-batches, idle 25%",
        "device 0  F0 F1 .  B0 F2 B1 .  B2",
        "device 1  .  F0 B0 F1 B1 F2 B2 .",
    ]
    assert "F0b" in draw(make_schedule("interleaved", 2, 2, 2))


@pytest.mark.parametrize(
    ("name", "chunks", "message"),
    [
        ("zigzag", 1, r"schedule='zigzag'.*1f1b.*gpipe.*interleaved"),
        ("1f1b", 2, r"2 stages on each device.*use schedule='interleaved'"),
        ("interleaved", 1, r"one stage on each device.*virtual_stages=2"),
    ],
)
def test_what_does_not_go_together_is_refused(name: str, chunks: int, message: str) -> None:
    with pytest.raises(UsageError, match=f"(?s){message}"):
        make_schedule(name, 2, 4, chunks)
