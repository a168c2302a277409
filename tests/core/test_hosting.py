"""Which worker hosts which device."""

from __future__ import annotations

from dtorch.core.hosting import ALONE, Hosting


def test_ids_are_dealt_out_in_turn() -> None:
    assert Hosting(3).hosts("cpu", [0, 1, 2, 3, 7]) == [0, 1, 2, 0, 1]
    assert Hosting(3).told(1) == "devices 1, 4, ..."
    assert ALONE.hosts("cuda", range(4)) == [0] * 4 and Hosting(3).limit("cpu") is None


def test_counted_ids_are_dealt_out_in_rows() -> None:
    hosting = Hosting(3, {"cpu": [3, 0, 2]})
    assert hosting.hosts("cpu", range(5)) == [0, 0, 0, 2, 2] and hosting.limit("cpu") == 5
    assert [hosting.told(n) for n in range(3)] == ["cpu:0-2", "no device", "cpu:3-4"]
    assert Hosting(2, {"cpu": [1, 2]}).told(0) == "cpu:0"
