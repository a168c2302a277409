"""Inputs that are cut at different places: what moves goes to where work lies evenly, unless little of it has to."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import Replicate, Shard, explain, init_device_mesh
from tests.sharding.harness import check, values

MESH = init_device_mesh("cpu", 2)


def split(tensor: torch.Tensor, dim: int, *sizes: int) -> dtorch.Tensor:
    return dtorch.Tensor(tensor, device_mesh=MESH, placements=[Shard(dim, sizes)])


def test_halves_of_one_tensor_meet_in_the_middle() -> None:
    packed = dtorch.Tensor(values(3, 64), device_mesh=MESH, placements=[Shard(1)])
    gate, up = packed.chunk(2, 1)
    assert [t.local_shape((0,))[1] for t in (gate, up)] == [32, 0]
    with explain() as report:
        made = gate * up
    assert made.placements == (Shard(1),)
    assert sum(event.comm.nbytes for event in report.events) == made.numel() * 4
    first, second = values(3, 64).chunk(2, 1)
    torch.testing.assert_close(made.to_torch(), first * second)


def test_what_is_small_goes_to_what_is_large() -> None:
    large, small = split(values(50, 9), 1, 6, 3), dtorch.Tensor(values(9), device_mesh=MESH, placements=[Shard(0)])
    with explain() as report:
        made = large + small
    assert made.placements == (Shard(1, (6, 3)),)
    assert sum(event.comm.nbytes for event in report.events) == 4
    torch.testing.assert_close(made.to_torch(), values(50, 9) + values(9))


def test_what_lies_alike_stays() -> None:
    with explain() as report:
        made = split(values(8, 3), 0, 8, 0) * split(values(8, 3), 0, 8, 0)
    assert made.placements == (Shard(0, (8, 0)),) and not report.events


def test_what_is_written_to_stays() -> None:
    written, plain = split(values(8, 3), 0, 8, 0), values(8, 3)
    written.add_(split(values(8, 3), 0, 1, 7))
    assert written.placements == (Shard(0, (8, 0)),)
    torch.testing.assert_close(written.to_torch(), plain + plain)


HEADS = {"as many keys": (6, 6), "groups": (8, 4), "one group a device": (4, 2)}


@pytest.mark.parametrize("heads", HEADS)
def test_heads_of_one_matrix_are_spread_evenly(heads: str) -> None:
    query, key = HEADS[heads]
    packed = torch.randn(2, query + 2 * key, 5, 8)
    whole = dtorch.Tensor(packed, device_mesh=MESH, placements=[Shard(1)])
    parts = [t.split([query, key, key], 1) for t in (packed, whole)]
    expected, made = (F.scaled_dot_product_attention(*p, is_causal=True, enable_gqa=query != key) for p in parts)
    assert made.placements == (Shard(1),)
    torch.testing.assert_close(made.to_torch(), expected)


def test_too_few_heads_for_all_devices() -> None:
    mesh = init_device_mesh("cpu", 5)
    packed = torch.randn(2, 6, 5, 8)
    whole = dtorch.Tensor(packed, device_mesh=mesh, placements=[Shard(1)])
    expected, made = (F.scaled_dot_product_attention(*t.chunk(3, 1)) for t in (packed, whole))
    torch.testing.assert_close(made.to_torch(), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_on_parts_of_one_matrix_with_gradients(causal: bool) -> None:
    check(lambda x: F.scaled_dot_product_attention(*x.chunk(3, 1), is_causal=causal), torch.randn(2, 9, 4, 8), grad=True)


def test_parts_of_one_matrix_with_gradients() -> None:
    def gated(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return F.linear(F.silu(gate) * up, w)

    check(gated, values(3, 14), values(4, 7), grad=True)


def test_replicated_inputs_are_cut_where_they_lie() -> None:
    whole = dtorch.Tensor(values(8, 3), device_mesh=MESH, placements=[Replicate()])
    with explain() as report:
        assert (whole + split(values(8, 3), 0, 7, 1)).placements == (Shard(0, (7, 1)),)
    assert not report.events
