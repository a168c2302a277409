"""Poison in the store."""

from __future__ import annotations

import torch

from dtorch.core.program import Failure
from dtorch.worker.store import Poison, Store

BAD = Poison(Failure(0, "x", 0, "cpu:0", "", "", ""))


def test_the_first_poison_is_found() -> None:
    store = Store({1: (torch.ones(1),), 2: BAD})
    assert store.poison_of([1, 2, 3]) is BAD and store.poison_of([1, 3]) is None


def test_spoiling_reaches_every_value_that_shares_the_memory() -> None:
    base, other = torch.zeros(4), torch.zeros(4)
    store = Store({1: (base,), 2: (other, base[1:2]), 3: (other,), 4: (torch.empty(0),), 5: (torch.empty(0),)})
    store.spoil(1, BAD)
    assert [h for h, v in store.items() if v is BAD] == [1, 2]
    store.spoil(4, BAD)
    assert [h for h, v in store.items() if v is BAD] == [1, 2, 4], "empty tensors share no memory"


def test_spoiling_keeps_an_older_poison_and_freeing_passes_over_nothing() -> None:
    older = Poison(BAD.failure)
    store = Store({1: older})
    store.spoil(1, BAD)
    store.spoil(7, BAD)
    assert store == {1: older}
    store.free([1, 7])
    assert store == {}


def test_memory_is_dropped_and_values_stay() -> None:
    base = torch.zeros(4)
    store = Store({1: (base, torch.ones(2)), 2: (base[1:],), 3: BAD})
    store.drop([1, 3])
    assert [t.untyped_storage().nbytes() for h in (1, 2) for t in store[h]] == [0, 0, 0]
    assert store[1][0].shape == (4,) and store[3] is BAD
    store.spoil(2, BAD)
    assert store[1] is BAD, "memory that was dropped is shared still"
