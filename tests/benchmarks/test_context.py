"""What attention over a split sequence takes of each device: less, the more devices there are."""

from __future__ import annotations

import pytest

from benchmarks import context


@pytest.mark.embedded("the memory of this process is what is measured")
@pytest.mark.parametrize("axis", ["ring_cp", "ulysses_cp"])
def test_memory_of_a_device_falls_as_the_ring_grows(axis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "LENGTH", 512)
    two, four = (context.attention(axis, devices)[0] for devices in (2, 4))
    print(f"{axis}: peak a device {two.peak / 2 / context.KIB:,.0f} KiB on 2, {four.peak / 4 / context.KIB:,.0f} KiB on 4")
    # Half, but for what does not depend on the length.
    assert four.largest <= 0.6 * two.largest
    assert four.peak / 4 <= 0.6 * two.peak / 2


def test_the_table_says_how_even_the_work_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "LENGTH", 64)
    monkeypatch.setattr(context, "DEVICES", (1, 2))
    rows = [line.split() for line in context.lines()][3:]
    assert [row[:2] for row in rows] == [["ring_cp", "1"], ["ring_cp", "2"], ["ulysses_cp", "1"], ["ulysses_cp", "2"]]
    assert rows[1][-2:] == ["1.49x", "1.00x"]
