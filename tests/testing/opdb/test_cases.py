"""Cases as text, and the placements that are drawn."""

from __future__ import annotations

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard, init_device_mesh
from dtorch.testing.opdb.cases import MESHES, parse_case
from dtorch.testing.opdb.placements import choices, dense, drawn, place, two
from dtorch.testing.opdb.samples import chosen
from tests.sharding.harness import values

CASES = ["forward:float32:2x2:0:S0R,RP", "out:complex64:3:12:S10,R,P", "forward:int64:4:1:-", "inplace_backward:bool:4:0:S0"]


@pytest.mark.parametrize("text", CASES)
def test_a_case_is_its_text(text: str) -> None:
    case = parse_case(text)
    assert str(case) == text
    assert case.sharded == any(letter in text.rsplit(":")[-1] for letter in "SP")


@pytest.mark.parametrize("text", ["", "forward:float32:3:0", "sideways:float32:3:0:R", "forward:float33:3:0:R", "out:bool:3:0:Q"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(dtorch.UsageError, match="variant:dtype:mesh:sample:placements"):
        parse_case(text)


def test_every_placement_is_a_choice() -> None:
    assert choices((3,), torch.zeros(2, 2), linear=True) == [(Replicate(),), (Shard(0),), (Shard(1),), (Partial(),)]
    assert len(choices((2, 2), torch.zeros(2, 2), linear=False)) == 9
    assert choices((3,), torch.zeros((), dtype=torch.int64), linear=True) == [(Replicate(),)]


def test_a_draw_is_seeded_and_has_no_doubles() -> None:
    rows = [choices((2, 2), torch.zeros(2, 2), linear=True)] * 3
    some = drawn(rows, 10, "seed")
    assert some == drawn(rows, 10, "seed") != drawn(rows, 10, "other")
    assert len(set(some)) == 10
    assert len(drawn(rows[:1], 16, "seed")) == 16
    assert len(drawn(rows * 20, 5, "seed")) == 5


def test_two_are_replicated_and_split() -> None:
    whole, split = two((2, 2), [choices((2, 2), torch.zeros(3), True), choices((2, 2), torch.zeros(()), True)], "seed")
    assert whole == ((Replicate(),) * 2,) * 2
    assert split == ((Shard(0), Shard(0)), (Replicate(), Replicate()))
    assert len(two((3,), [choices((3,), torch.zeros(()), False)], "seed")) == 1


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_what_is_placed_has_value_and_strides(mesh: tuple[int, ...], order: tuple[int, ...]) -> None:
    plain = values(5, 3, 4).permute(order)
    for placements in choices(mesh, plain, linear=True):
        placed = place(plain, init_device_mesh("cpu", mesh), placements)
        assert placed.placements == placements and placed.stride() == plain.stride()
        torch.testing.assert_close(placed.to_torch(), plain)


def test_gaps_and_overlaps_are_closed() -> None:
    assert dense(torch.zeros(4, 4)[:, ::2]).is_contiguous()
    assert dense(torch.zeros(1, 4).expand(3, 4)).is_contiguous()
    assert dense(torch.zeros(2, 3).t()).stride() == (1, 3)


def test_samples_are_spread() -> None:
    assert chosen(10, None) == list(range(10))
    assert chosen(10, 3) == [0, 3, 6]
    assert chosen(2, 3) == [0, 1]
