"""Embedding against plain torch: tables split by rows, by features and by both, and numbers that no piece holds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import RemoteError, Replicate, Shard, init_device_mesh
from dtorch.core.placements import Partial
from tests.sharding.harness import check, not_replicated, place, stays, values

IDS = torch.tensor([[0, 9, 4], [3, 3, 7]])


def test_every_placement():
    check(lambda w, i: F.embedding(i, w), values(10, 4), IDS, grad=True, limit=15)


@pytest.mark.parametrize("ids", [torch.tensor(7), torch.tensor([2, 9, 0]), torch.empty(0, 3, dtype=torch.long), IDS.int()])
def test_shapes_of_numbers(ids):
    check(lambda w, i: F.embedding(i, w), values(10, 3), ids, grad=True, limit=10)


def test_padding():
    check(lambda w, i: F.embedding(i, w, padding_idx=3), values(10, 4), IDS, grad=True, limit=15)
    check(lambda w, i: F.embedding(i, w, padding_idx=-1), values(10, 4), IDS, grad=True, limit=15)


def test_gradients_scaled_by_frequency():
    check(lambda w, i: F.embedding(i, w, scale_grad_by_freq=True), values(10, 4), IDS, grad=True, limit=15)


def test_two_tables_of_one_vocabulary_and_a_tied_head():
    def fn(a, b, i):
        x = F.embedding(i, a) + F.embedding(i, b, padding_idx=3)
        return x @ a.T

    check(fn, values(10, 4), values(10, 4, seed=1), IDS, grad=True, limit=15)


def test_rows_that_are_not_numbers_stay_where_they_are():
    w = values(10, 4)
    w[3], w[9] = float("nan"), float("inf")
    check(lambda w, i: F.embedding(i, w), w, IDS, limit=15, partial=())


@pytest.mark.parametrize("wrong", [-1, 10, 11, -11])
@pytest.mark.parametrize("placements", [[Shard(0), Shard(0)], [Shard(0), Replicate()], [Shard(0), Shard(1)]])
def test_a_number_that_no_piece_holds_is_an_error(wrong, placements):
    mesh = init_device_mesh("cpu", (2, 2))
    w = place(values(10, 4), mesh, tuple(placements))
    with pytest.raises(RemoteError, match="index out of range in self"):
        F.embedding(torch.tensor([0, wrong]), w).to_torch()


def test_a_split_vocabulary_gives_a_partial_sum_and_moves_nothing():
    out = stays(
        lambda w, i: F.embedding(i, w), values(10, 4), IDS, mesh=(2, 2), placements=[[Shard(0), Shard(0)], [Replicate()] * 2]
    )
    assert out.placements == (Partial(), Partial())
    out = stays(
        lambda w, i: F.embedding(i, w), values(10, 4), IDS, mesh=(2, 2), placements=[[Shard(0), Shard(1)], [Replicate()] * 2]
    )
    assert out.placements == (Partial(), Shard(2))
    out = stays(
        lambda w, i: F.embedding(i, w),
        values(10, 4),
        IDS,
        mesh=(2, 2),
        placements=[[Replicate(), Shard(0)], [Shard(0), Replicate()]],
    )
    assert out.placements == (Shard(0), Partial())


def test_a_split_vocabulary_is_never_gathered():
    mesh = init_device_mesh("cpu", (2,))
    w = place(values(10, 4), mesh, (Shard(0),))
    ids = dtorch.Tensor(torch.arange(400) % 10, device_mesh=mesh, placements=[Shard(0)])
    out = not_replicated(lambda: F.embedding(ids, w), at_most_nbytes=400 * 8)
    assert out.placements == (Partial(),)


def test_module():
    module = torch.nn.Embedding(10, 4, padding_idx=2)
    check(lambda w, i: torch.func.functional_call(module, {"weight": w}, (i,)), module.weight.detach(), IDS, grad=True, limit=15)


@pytest.mark.parametrize("padding", [None, 7])
@pytest.mark.parametrize(
    ("table", "ids", "grad"),
    [
        ([Shard(0), Shard(0)], [Replicate()] * 2, [Shard(0), Shard(0)]),
        ([Replicate(), Shard(0)], [Shard(0), Replicate()], [Partial(), Shard(0)]),
        ([Shard(1), Shard(0)], [Replicate()] * 2, [Shard(1), Shard(0)]),
        ([Replicate(), Shard(0, (1, 9))], [Shard(1), Replicate()], [Partial(), Shard(0, (1, 9))]),
    ],
)
def test_the_gradient_of_a_split_table_is_split_alike(table, ids, grad, padding):
    mesh = init_device_mesh("cpu", (2, 2))
    plain = values(10, 4).requires_grad_()
    expected = torch.autograd.grad(F.embedding(IDS, plain, padding).square().sum(), plain)[0]
    w = place(plain, mesh, tuple(table)).requires_grad_()
    out = F.embedding(place(IDS, mesh, tuple(ids)), w, padding).square().sum()
    got = torch.autograd.grad(out, w)[0]
    assert got.placements == tuple(grad)
    torch.testing.assert_close(got.to_torch(), expected)


def test_what_is_remembered_of_tables_never_decides_a_value():
    mesh = init_device_mesh("cpu", (2,))
    plain = [values(10, 4, seed=s).requires_grad_() for s in range(2)]
    expected = torch.autograd.grad(sum(F.embedding(IDS, t).square().sum() for t in plain), plain)
    placed = [place(t, mesh, (p,)).requires_grad_() for t, p in zip(plain, (Replicate(), Shard(0)), strict=True)]
    got = torch.autograd.grad(sum(F.embedding(IDS, t).square().sum() for t in placed), placed)
    for a, e in zip(got, expected, strict=True):
        torch.testing.assert_close(a.to_torch(), e)
