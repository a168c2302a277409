"""Values dealt out to the places of a mask, as features of images to the tokens that stand for them."""

from __future__ import annotations

import pytest
import torch

from dtorch import Replicate, Shard, init_device_mesh
from tests.sharding.harness import check, not_replicated, place, values

MASKS = {
    "whole": lambda g: torch.rand(5, 6, generator=g) < 0.4,
    "none": lambda g: torch.zeros(5, 6, dtype=torch.bool),
    "all": lambda g: torch.ones(5, 6, dtype=torch.bool),
    "rows": lambda g: torch.rand(5, 1, generator=g) < 0.5,
    "columns": lambda g: torch.rand(6, generator=g) < 0.5,
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    mask = MASKS[name](torch.Generator().manual_seed(1))
    check(lambda x, m, s: x.masked_scatter(m, s), values(5, 6), mask, values(6, 7, seed=2), grad=True, limit=15)


def test_in_place_and_integers() -> None:
    mask = torch.rand(5, 6) < 0.4

    def fn(x: torch.Tensor, m: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return x.clone().masked_scatter_(m, s), x.long().masked_scatter(m, s.long())

    check(fn, values(5, 6), mask, values(30, seed=2), limit=12)


def test_a_tensor_that_broadcasts_to_the_mask() -> None:
    mask = torch.rand(5, 6) < 0.4
    check(lambda x, m, s: x.masked_scatter(m, s), values(6), mask, values(30, seed=2), grad=True, limit=12)


def test_nothing_to_deal_and_no_dims() -> None:
    check(lambda x, m, s: x.masked_scatter(m, s), values(5, 6), torch.zeros(5, 6, dtype=torch.bool), values(0), limit=10)
    check(lambda x, m, s: x.masked_scatter(m, s), values(), torch.tensor(True), values(4), limit=10)


def test_more_values_than_places_have_no_gradient() -> None:
    mask = torch.tensor([True, False, True, False, True])
    check(lambda x, m, s: x.masked_scatter(m, s), values(5), mask, values(9, seed=2), grad=True, limit=12)


def test_too_few_values_are_refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    x, mask = place(values(4, 3), mesh, (Shard(0),)), place(torch.ones(4, 3, dtype=torch.bool), mesh, (Shard(0),))
    with pytest.raises(RuntimeError):
        x.masked_scatter(mask, place(values(5), mesh, (Replicate(),))).to_torch()


def test_tokens_stay_where_they_are() -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = place(values(64, 8), mesh, (Shard(0),))
    mask = place(torch.rand(64, 1) < 0.5, mesh, (Shard(0),))
    features = place(values(64, 8), mesh, (Replicate(),))
    # Each device sends the number of its places.
    out = not_replicated(lambda: x.masked_scatter(mask, features), at_most_nbytes=8 * 4 * 3)
    assert out.placements == x.placements
