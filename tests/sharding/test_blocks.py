"""Blocks of a causal mask: together exactly what it shows, and in zig-zag order the same work for every device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtorch.core.placements import balanced, starts
from dtorch.sharding.rules.blocks import Block, blocks, zigzag
from dtorch.sharding.rules.laid import Runs, count, joined


def positions(runs: Runs) -> list[int]:
    return [p for start, n in runs for p in range(start, start + n)]


def seen(found: list[Block], rows: int, keys: int) -> torch.Tensor:
    """How often each pair of a query and a key is computed."""
    times = torch.zeros(rows, keys, dtype=torch.long)
    for b in found:
        part = torch.ones(b.rows, b.keys, dtype=torch.long)
        times[b.row : b.row + b.rows, b.key : b.key + b.keys] += part.tril() if b.causal else part
    return times


@st.composite
def some_runs(draw: st.DrawFn) -> Runs:
    """Up to three runs of positions below 30, in order."""
    cuts = sorted(draw(st.lists(st.integers(0, 30), min_size=0, max_size=6)))
    return joined([(a, b - a) for a, b in zip(cuts[::2], cuts[1::2], strict=False)])


@given(some_runs(), some_runs())
def test_each_pair_that_a_causal_mask_shows_is_computed_once(rows: Runs, keys: Runs) -> None:
    found = blocks(rows, keys, True)
    expected = torch.tensor(positions(rows)).view(-1, 1) >= torch.tensor(positions(keys)).view(1, -1)
    assert torch.equal(seen(found, count(rows), count(keys)), expected.long())
    assert all(b.rows > 0 and b.keys > 0 and (b.rows == b.keys or not b.causal) for b in found)


@given(some_runs(), some_runs())
def test_without_a_mask_one_block_is_all(rows: Runs, keys: Runs) -> None:
    found = blocks(rows, keys, False)
    assert found == ([Block(0, count(rows), 0, count(keys), False)] if rows and keys else [])


@given(st.integers(0, 40), st.integers(1, 6))
def test_zigzag_is_a_partition(length: int, devices: int) -> None:
    runs = zigzag(length, devices)
    assert sorted(p for leaf in runs for p in positions(leaf)) == list(range(length))
    assert max(map(count, runs)) - min(map(count, runs)) <= 2


def work(runs: list[Runs]) -> list[list[int]]:
    """Pairs that each device computes at each step of a ring."""
    n = len(runs)
    return [[sum(b.work for b in blocks(runs[i], runs[(i - s) % n], True)) for s in range(n)] for i in range(n)]


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
def test_every_device_does_the_same_work_at_every_step(devices: int) -> None:
    length = 4 * 2 * devices
    balanced_work = work(zigzag(length, devices))
    assert all(row == balanced_work[0] for row in balanced_work)
    pieces = balanced(length, devices)
    plain = [sum(row) for row in work([[(a, n)] for a, n in zip(starts(pieces), pieces, strict=True)])]
    total = length * (length + 1) // 2
    print(
        f"{devices} devices: {max(plain) / (total / devices):.2f} of the mean on the busiest as the pieces lie, 1.00 in zig-zag"
    )
    assert sum(map(sum, balanced_work)) == sum(plain) == total
    assert max(plain) > 1.3 * total / devices


def test_few_kernels() -> None:
    runs = zigzag(16, 2)
    assert blocks(runs[0], runs[0], True) == [Block(0, 8, 0, 8, True)]
    assert blocks(runs[1], runs[0], True) == [Block(0, 8, 0, 4, False)]
    assert blocks(runs[0], runs[1], True) == [Block(4, 4, 0, 8, False)]
