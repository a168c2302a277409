"""Placements: values, text, and the split they stand for."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtorch import Partial, Placement, PlacementError, Replicate, Shard
from dtorch.core.placements import balanced, starts


def test_equality_hash_and_pickling() -> None:
    assert Shard(0) == Shard(0) != Shard(1)
    assert Shard(0, [1, 2]) == Shard(0, (1, 2)) != Shard(0)
    assert Partial() == Partial("sum") != Partial("max")
    assert len({Replicate(), Replicate(), Shard(0), Shard(0), Partial(), Partial("sum")}) == 3
    for p in (Replicate(), Shard(1, (2, 3)), Partial("avg")):
        assert pickle.loads(pickle.dumps(p)) == p
        assert isinstance(p, Placement)


def test_repr_can_be_read_back() -> None:
    for p in (Replicate(), Shard(-1), Shard(1, (2, 3)), Partial(), Partial("avg")):
        assert eval(repr(p)) == p


def test_unknown_reduce_op() -> None:
    with pytest.raises(PlacementError, match="'median'"):
        Partial("median")


def test_placements_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Shard(0).dim = 1


@given(st.integers(0, 100), st.integers(1, 20))
def test_balanced_covers_and_leaves_no_piece_empty_while_there_are_enough(n: int, k: int) -> None:
    sizes = balanced(n, k)
    assert sum(sizes) == n and len(sizes) == k
    assert sorted(sizes, reverse=True) == list(sizes) and sizes[0] - sizes[-1] <= 1
    assert n < k or 0 not in sizes


def test_starts() -> None:
    assert starts((3, 0, 2)) == [0, 3, 3]
    assert starts(()) == []
