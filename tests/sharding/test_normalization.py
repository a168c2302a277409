"""Layer and RMS normalisation against plain torch, with the normalised dims split too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dtorch import Replicate, Shard, init_device_mesh
from tests.sharding.harness import check, not_replicated, place, values

_aten = torch.ops.aten


def norm(x, w=None, b=None):
    return F.layer_norm(x, x.shape[-1:], w, b)


def test_layer_norm():
    check(norm, values(4, 3, 6), values(6, seed=1), values(6, seed=2), grad=True, limit=10)


def test_layer_norm_without_weight_or_bias():
    check(norm, values(4, 6), grad=True, limit=10)
    check(norm, values(4, 6), values(6, seed=1), grad=True, limit=10)
    check(lambda x, b: norm(x, None, b), values(4, 6), values(6, seed=1), grad=True, limit=10)


def test_layer_norm_of_one_row():
    check(norm, values(6), values(6, seed=1), values(6, seed=2), grad=True, limit=10)


def test_two_normalised_dims():
    check(
        lambda x, w, b: F.layer_norm(x, (4, 6), w, b),
        values(3, 4, 6),
        values(4, 6, seed=1),
        values(4, 6, seed=2),
        grad=True,
        limit=10,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_layer_norm_dtypes(dtype):
    x, w, b = values(4, 6, dtype=dtype), values(6, seed=1, dtype=dtype), values(6, seed=2, dtype=dtype)
    check(norm, x, w, b, grad=True, partial=(), limit=15, rtol=2e-2, atol=2e-2)


def test_float_weights_of_bfloat16_input():
    x, w, b = values(4, 6, dtype=torch.bfloat16), values(6, seed=1), values(6, seed=2)
    check(norm, x, w, b, grad=True, partial=(), limit=15, rtol=2e-2, atol=2e-2)


def test_statistics_are_results_too():
    check(lambda x: _aten.native_layer_norm.default(x, [6], None, None, 1e-5), values(4, 6))


@pytest.mark.parametrize("mask", [[True, False, False], [False, True, False], [True, False, True], [False, True, True]])
def test_backward_gives_what_is_asked_for(mask):
    x, w, b = values(4, 6), values(6, seed=1), values(6, seed=2)
    _, mean, rstd = _aten.native_layer_norm.default(x, [6], w, b, 1e-5)

    def fn(g, x, mean, rstd, w, b):
        return [t for t in _aten.native_layer_norm_backward.default(g, x, [6], mean, rstd, w, b, mask) if t is not None]

    check(fn, values(4, 6, seed=3), x, mean, rstd, w, b, limit=10)


def test_rms_norm_as_torch_runs_it():
    check(
        lambda x, w: F.rms_norm(x, (6,), w, 1e-5), values(4, 3, 6), values(6, seed=1), grad=True, rtol=1e-4, atol=1e-5, limit=10
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_fused_rms_norm(dtype, eps):
    x, w = values(4, 6, dtype=dtype), values(6, seed=1, dtype=dtype)

    def fused(x, w=None):
        with torch.inference_mode():
            return _aten._fused_rms_norm.default(x, [6], w, eps)

    check(fused, x, w, rtol=1e-2, atol=1e-2, limit=15)
    check(fused, x / 1000, rtol=1e-2, atol=1e-2, partial=())


def test_fused_rms_norm_backward():
    """Its kernel is CUDA's, so on the CPU only the composed form runs: under a split of the normalised dim."""
    mesh = init_device_mesh("cpu", (2, 2))
    x, w, g = values(4, 6), values(6, seed=1), values(4, 6, seed=2)
    xs, ws = x.clone().requires_grad_(), w.clone().requires_grad_()
    expected = torch.autograd.grad(F.rms_norm(xs, (6,), ws, 1e-5), (xs, ws), g)
    rstd = (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    split, line = (Shard(0), Shard(1)), (Shard(0), Replicate())
    placed = [place(g, mesh, split), place(x, mesh, split), place(rstd, mesh, line), place(w, mesh, (Replicate(), Shard(0)))]
    got = _aten._fused_rms_norm_backward.default(placed[0], placed[1], [6], placed[2], placed[3], [True, True])
    for a, e in zip(got, expected, strict=True):
        torch.testing.assert_close(a.to_torch(), e)


def test_a_split_normalised_dim_moves_only_statistics():
    mesh = init_device_mesh("cpu", (2, 2))
    split = (Replicate(), Shard(1))
    x, w = place(values(4, 512), mesh, split), place(values(512), mesh, (Replicate(), Shard(0)))
    out = not_replicated(norm, x, w, w, at_most_nbytes=2 * 2 * 4 * 4 * 2)
    assert out.placements == split


def test_the_gradient_of_a_split_normalised_dim_moves_only_statistics():
    mesh = init_device_mesh("cpu", (2,))
    x = place(values(4, 512), mesh, (Shard(1),)).requires_grad_()
    w = place(values(512), mesh, (Shard(0),)).requires_grad_()
    out = norm(x, w, w)
    gx, gw = not_replicated(lambda: torch.autograd.grad(out, (x, w), out), at_most_nbytes=3 * 2 * 4 * 4 * 2)
    assert gx.placements == (Shard(1),)
    assert gw.placements == (Shard(0),)
