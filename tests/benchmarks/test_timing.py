"""Pairs of runs, the client without workers, and memory that grows."""

from __future__ import annotations

import pytest
import torch

import dtorch
from benchmarks.client_only import client_only
from benchmarks.figure import Figure
from benchmarks.peak import peak_resident_nbytes
from benchmarks.scalar import Growth
from benchmarks.timing import Pairs, Sample, clocked, middle_half, paired


def samples(*seconds: float) -> list[Sample]:
    return [Sample(wall_s=s, cpu_s=s / 2) for s in seconds]


def test_each_side_goes_first_in_turn() -> None:
    order: list[str] = []
    pairs = paired(lambda: order.append("base"), lambda: order.append("other"), 3)
    assert order == ["base", "other", "other", "base", "base", "other"]
    assert len(pairs.base) == len(pairs.other) == 3


def test_the_ratio_is_the_median_over_pairs() -> None:
    # A disturbed pair moves neither.
    pairs = Pairs(base=samples(1, 1, 10), other=samples(2, 3, 25))
    assert pairs.ratios == [2, 3, 2.5]
    assert pairs.ratio == pairs.cpu_ratio == 2.5
    assert pairs.spread == (2.25, 2.75)
    assert pairs.times(1e-3, "ms", runs=10) == "100 ms -> 300 ms"


def test_one_sample_is_its_own_spread() -> None:
    assert middle_half([4.0]) == (4.0, 4.0)


def test_a_clocked_run_is_run_once() -> None:
    calls: list[int] = []
    sample = clocked(lambda: calls.append(1))
    assert calls == [1] and sample.wall_s >= 0 and sample.cpu_s >= 0


def test_the_client_alone_runs_nothing_and_leaves_the_session_usable() -> None:
    x = dtorch.Tensor(torch.arange(6.0))
    client, sink = dtorch.session(), dtorch.session().sink
    with client_only():
        lost = [x * 7 - 1 for _ in range(3)]
        x.add_(1)
        assert client.sink is not sink
    assert client.sink is sink
    del lost
    # Planned anew, since the worker never saw the plans made within.
    assert torch.equal((x * 7 - 1).to_torch(), torch.arange(6.0) * 7 - 1)


def test_growth_counts_from_the_end_of_the_warm_up() -> None:
    meter = iter([100, 50, 60, 60, 60, 160, 64])
    growth = Growth(lambda: next(meter))
    for step in range(5):
        growth.read(step)
    growth.peek()
    growth.read(5)
    assert (growth.total, growth.steps, growth.high) == (64 - 50, 4, 100)


def test_the_peak_is_that_of_this_process() -> None:
    before = peak_resident_nbytes()
    block = torch.ones(before // 4 + (8 << 20))
    assert before > 0 and peak_resident_nbytes() > block.nbytes


@pytest.mark.parametrize(("measured", "reached"), [(1.0, True), (2.0, True), (2.1, False)])
def test_a_limit_may_be_met_exactly(measured: float, reached: bool) -> None:
    assert Figure(name="a", title="a", measured=measured, limit=2).reached is reached
