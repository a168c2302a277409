"""Elementwise and samplewise losses against plain torch: every reduction, and means over uneven and empty pieces."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dtorch import Shard, init_device_mesh
from tests.sharding.harness import check, place, values

REDUCTIONS = ["none", "mean", "sum"]
_aten = torch.ops.aten


def rows(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return values(7, 3, seed=seed, dtype=dtype)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.l1_loss, F.soft_margin_loss])
def test_elementwise(loss, reduction):
    check(lambda x, y: loss(x, y, reduction=reduction), rows(), rows(1), grad=loss is not F.soft_margin_loss, limit=7)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_soft_margin(reduction):
    check(lambda x, y: F.soft_margin_loss(x, y.detach(), reduction=reduction), rows(), rows(1).sign(), grad=True, limit=7)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_parameters_of_a_loss(reduction):
    check(lambda x, y: F.smooth_l1_loss(x, y, reduction=reduction, beta=0.5), rows(), rows(1), grad=True, limit=6)
    check(lambda x, y: F.huber_loss(x, y, reduction=reduction, delta=0.5), rows(), rows(1), grad=True, limit=6)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_binary_cross_entropy(reduction):
    p, y, w = rows().sigmoid(), rows(1).sigmoid(), rows(2).abs()
    check(lambda x, y: F.binary_cross_entropy(x, y.detach(), reduction=reduction), p, y, grad=True, limit=7, partial=())
    check(
        lambda x, y, w: F.binary_cross_entropy(x, y.detach(), w.detach(), reduction=reduction),
        p,
        y,
        w,
        grad=True,
        limit=7,
        partial=(),
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_binary_cross_entropy_with_logits(reduction):
    def fn(x, y, w=None, p=None):
        return F.binary_cross_entropy_with_logits(
            x, y.detach(), w.detach() if w is not None else w, reduction=reduction, pos_weight=p if p is None else p.detach()
        )

    check(fn, rows(), rows(1).sigmoid(), grad=True, limit=7)
    check(fn, rows(), rows(1).sigmoid(), values(3, seed=2).abs(), values(3, seed=3).abs(), grad=True, limit=7)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_samplewise(reduction):
    target = torch.tensor([0, 2, 1, 1, 0, 2, 0])
    check(lambda x, t: F.multi_margin_loss(x, t, reduction=reduction), rows(), target, grad=True, limit=7)
    check(
        lambda x, t, w: F.multi_margin_loss(x, t, p=2, weight=w.detach(), reduction=reduction),
        rows(),
        target,
        values(3, seed=1).abs(),
        grad=True,
        limit=7,
    )
    many = torch.tensor([[0, 2, -1], [1, -1, -1], [-1, -1, -1], [2, 1, 0], [0, -1, 1], [1, 2, -1], [2, -1, -1]])
    check(lambda x, t: F.multilabel_margin_loss(x, t, reduction=reduction), rows(), many, grad=True, limit=7)


def test_one_sample():
    check(lambda x, t: F.multi_margin_loss(x, t), values(3), torch.tensor([1]), grad=True)
    check(lambda x, t: F.multilabel_margin_loss(x, t), values(3), torch.tensor([1, 0, -1]), grad=True)


def test_samples_as_many_as_classes():
    x, t, w = values(3, 3), torch.tensor([2, 0, 1]), values(3, seed=1).abs()
    for reduction in REDUCTIONS:
        check(lambda x, t, w, r=reduction: F.multi_margin_loss(x, t, weight=w.detach(), reduction=r), x, t, w, grad=True, limit=7)


def test_a_gradient_placed_like_the_weights():
    """As many samples as classes, and both vectors split alike: they are told apart by name."""

    def fn(g, x, t, w):
        return _aten.multi_margin_loss_backward.default(g, x, t, 1, 1.0, w, 0)

    mesh = init_device_mesh("cpu", (3,))
    plain = [values(3, seed=2), values(3, 3), torch.tensor([2, 0, 1]), values(3, seed=1).abs()]
    placed = [place(t, mesh, (Shard(0),)) for t in plain]
    torch.testing.assert_close(fn(*placed).to_torch(), fn(*plain))


@pytest.mark.parametrize("loss", [F.mse_loss, F.huber_loss, F.smooth_l1_loss])
def test_broadcasting(loss):
    check(lambda x, y: loss(*torch.broadcast_tensors(x, y)), rows(), values(3, seed=1), grad=True, limit=15)
    check(lambda x, y: loss(*torch.broadcast_tensors(x, y)), values(7, 1), values(1, 3, seed=1), grad=True, limit=15)


def test_no_elements():
    check(lambda x, y: F.mse_loss(x, y), torch.empty(0, 3), torch.empty(0, 3), grad=True, limit=10)
    check(lambda x, y: F.huber_loss(x, y) + F.smooth_l1_loss(x, y), torch.empty(0, 3), torch.empty(0, 3), grad=True, limit=10)
    check(lambda x, y: F.soft_margin_loss(x, y.detach()), torch.empty(0, 3), torch.empty(0, 3), grad=True, limit=10)


@pytest.mark.parametrize("loss", [F.mse_loss, F.huber_loss])
def test_half_precision_means_of_many(loss):
    x, y = values(500, 3, dtype=torch.bfloat16) * 8, values(500, 3, dtype=torch.bfloat16, seed=1)
    check(loss, x, y, grad=True, limit=6, partial=(), rtol=1e-2, atol=1e-5)


def test_composite_losses():
    x, y = rows(), rows(1).softmax(-1)
    check(lambda x, y: F.kl_div(x, y, reduction="batchmean"), x, y, grad=True, limit=6)
    check(lambda x, y: F.poisson_nll_loss(x, y), x, y, grad=True, limit=6)
    check(lambda x, y: F.gaussian_nll_loss(x, y, y.abs() + 1), x, y, grad=True, limit=6, partial=())
    check(lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(7)), x, y, grad=True, limit=6)
    check(lambda x, y: F.triplet_margin_loss(x, y, y + 1), x, y, grad=True, limit=6, rule=False)
    check(lambda x, y: F.margin_ranking_loss(x, y, torch.ones(7, 3)), x, y, grad=True, limit=6)
    check(lambda x, y: F.hinge_embedding_loss(x, y.detach().sign()), x, y, grad=True, limit=6)
    check(lambda x, y: F.multilabel_soft_margin_loss(x, y.detach().sign()), x, y, grad=True, limit=6, rule=False)
