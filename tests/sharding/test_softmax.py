"""Softmax and its kin against plain torch, with the normalised dim split too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import Replicate, Shard, init_device_mesh
from tests.sharding.harness import check, not_replicated, place, values

_aten = torch.ops.aten


@pytest.mark.parametrize("fn", [F.softmax, F.log_softmax])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_forward_and_backward(fn, dim):
    check(lambda x: fn(x, dim), values(4, 3, 5), grad=True)


@pytest.mark.parametrize("fn", [F.softmax, F.log_softmax])
def test_one_number_and_one_row(fn):
    check(lambda x: fn(x, 0), values(5), grad=True)
    check(lambda x: fn(x, 0), torch.tensor(2.0), grad=True)


@pytest.mark.parametrize("fn", [F.softmax, F.log_softmax])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(fn, dtype):
    atol = 1e-6 if dtype is torch.float64 else 5e-3
    check(lambda x: fn(x, -1), values(4, 6, dtype=dtype), grad=True, partial=(), rtol=1e-2, atol=atol)


@pytest.mark.parametrize("fn", [F.softmax, F.log_softmax])
def test_to_a_wider_dtype(fn):
    check(
        lambda x: fn(x, -1, dtype=torch.float32), values(4, 6, dtype=torch.bfloat16), grad=True, partial=(), rtol=1e-2, atol=5e-3
    )


@pytest.mark.parametrize("fn", [_aten._softmax.default, _aten._log_softmax.default, _aten._safe_softmax.default])
def test_infinities(fn):
    x = values(4, 6)
    x[0] = float("-inf")
    x[1, :5] = float("-inf")
    x[2, 2] = float("inf")
    args = () if fn is _aten._safe_softmax.default else (False,)
    check(lambda x: fn(x, 1, *args), x, partial=())


@pytest.mark.parametrize("fn", [_aten._softmax_backward_data.default, _aten._log_softmax_backward_data.default])
@pytest.mark.parametrize("dim", [0, 1])
def test_backward_under_every_placement_of_both(fn, dim):
    check(lambda g, out: fn(g, out, dim, torch.float32), values(4, 6), values(4, 6, seed=1))


def test_safe_softmax():
    check(lambda x: _aten._safe_softmax.default(x, -1), values(4, 3, 6), grad=True)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,)])
def test_no_elements(shape):
    check(lambda x: F.softmax(x, -1), torch.empty(shape), partial=())


def test_a_large_split_dim_moves_only_what_is_reduced():
    mesh = init_device_mesh("cpu", (2, 2))
    x = place(values(4, 512), mesh, (Replicate(), Shard(1)))
    for fn in (F.softmax, F.log_softmax):
        out = not_replicated(lambda fn=fn: fn(x, 1), at_most_nbytes=2 * 2 * 4 * 4 * 2)
        assert out.placements == x.placements


def test_the_view_after_a_softmax_of_a_transposed_tensor_is_possible():
    mesh = init_device_mesh("cpu", (2,))
    x = values(6, 4, 2)
    y = dtorch.Tensor(x, device_mesh=mesh, placements=[Shard(1)]).transpose(0, 2)
    out = F.softmax(y, 1)
    assert out.stride() == F.softmax(x.transpose(0, 2), 1).stride()
    torch.testing.assert_close(out.view(-1).to_torch(), F.softmax(x.transpose(0, 2), 1).view(-1))
