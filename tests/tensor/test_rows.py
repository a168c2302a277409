"""Rows sent along an axis: in the order of their senders, there and back, with their gradients."""

from __future__ import annotations

import pytest
import torch

import dtorch
from dtorch import Shard, explain, init_device_mesh
from dtorch.sharding.rows import answered
from dtorch.tensor.rows import rows_sent

MESH = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "ep"))
SIZES = (4, 0, 2, 1, 3, 2)
COUNTS = ((1, 0, 3), (0, 0, 0), (0, 2, 0), (0, 0, 1), (1, 1, 1), (2, 0, 0))


def split() -> dtorch.Tensor:
    places = [Shard(0, (6, 6)), Shard(0, SIZES)]
    return dtorch.Tensor(torch.arange(24.0).view(12, 2), device_mesh=MESH, placements=places)


def test_each_device_has_what_was_sent_to_it() -> None:
    with explain() as report:
        out = rows_sent(split(), 1, COUNTS)
    assert [s.shape[0] for s in out.shards] == [1, 2, 3, 3, 1, 2]
    assert (out[:, 0] / 2).tolist() == [0, 4, 5, 1, 2, 3, 7, 10, 11, 8, 6, 9]
    (event,) = report.events
    assert (event.comm.kind, event.comm.axis, event.comm.nbytes) == ("all_to_all", "ep", (3 + 2 + 1 + 2 + 2) * 2 * 4)


def test_there_and_back() -> None:
    x = split()
    out = rows_sent(rows_sent(x, 1, COUNTS), 1, answered(x._spec, 1, COUNTS))
    assert out.placements == x.placements and torch.equal(out, x)


def test_an_outer_axis() -> None:
    x = split()
    counts = tuple((n // 2, n - n // 2) for n in SIZES)
    out = rows_sent(x, 0, counts)
    assert sorted((out[:, 0] / 2).tolist()) == list(range(12))
    assert torch.equal(rows_sent(out, 0, answered(x._spec, 0, counts)), x)


@pytest.mark.parametrize("axis", [0, 1])
def test_gradients_go_the_same_way(axis: int) -> None:
    x = split().requires_grad_()
    counts = COUNTS if axis else tuple((n, 0) for n in SIZES)
    weights = torch.randn(12, 2)
    out = rows_sent(x, axis, counts)
    (out * weights).sum().backward()
    order = (out.detach()[:, 0] / 2).to(torch.int64).to_torch()
    expected = torch.empty(12, 2)
    expected[order] = weights
    assert torch.equal(x.grad.to_torch(), expected)
