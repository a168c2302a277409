"""Uneven and empty shards keep the order in memory of the whole, so that what PyTorch lets be viewed can be viewed."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from dtorch import Replicate, Shard, init_device_mesh
from tests.sharding.harness import check, pieces_fit, place, same, values

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule:RuntimeWarning")
R = Replicate()
ORDERS = list(itertools.permutations(range(3)))
MIXED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "expanded number times": lambda s, p: s.sum().expand(p.shape) * p,
    "expanded row times": lambda s, p: s[:1, :1].unsqueeze(0).expand(p.shape) + p,
    "where": lambda s, p: torch.where(p > 0, p, s.sum().expand(p.shape)),
    "largest": lambda s, p: torch.maximum(s[0, 0].expand(p.shape), p),
    "in three": lambda s, p: torch.addcmul(s[0, 0].expand(p.shape), p, p),
}


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("fn", MIXED.values(), ids=MIXED)
def test_results_with_expanded_tensors_can_be_viewed_as_the_whole(fn: Callable, order: tuple) -> None:
    back = [order.index(d) for d in range(3)]

    def program(s: torch.Tensor, x: torch.Tensor) -> tuple:
        out = fn(s, x.permute(order))
        return out, out.permute(back).contiguous().view(-1), _flat_where_plain_is(out, back)

    check(program, values(5, 4), values(2, 3, 5, seed=1), rule=False, limit=8)


def _flat_where_plain_is(out: torch.Tensor, back: list[int]) -> torch.Tensor:
    """The result flattened by a view in the order it has in memory, where it is dense in that order."""
    turned = out.permute(back)
    return turned.view(-1) if turned.is_contiguous() else out


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "orders", [((0, 2, 1), (0, 2, 1)), ((2, 1, 0), (0, 2, 1)), ((0, 2, 1), (1, 0, 2)), ((0, 1, 2), (0, 2, 1))], ids=str
)
def test_convolutions_of_lines_whose_channels_come_last(orders: tuple, transposed: bool) -> None:
    """The kernels keep such an order, also of weights alone: results and gradients can be viewed as plain ones."""

    def program(x: torch.Tensor, w: torch.Tensor) -> tuple:
        turned = [_in_order(t, order).detach().requires_grad_() for t, order in zip((x, w), orders, strict=True)]
        with torch.enable_grad():
            out = (F.conv_transpose1d if transposed else F.conv1d)(*turned)
            out.sum().backward()
        grads = [t.grad for t in turned]
        return out.detach(), out.stride(), grads, [g.stride() for g in grads], [g.reshape(-1) for g in grads], out.flatten(1)

    check(program, values(3, 4, 6), values(4, 4, 2, seed=1), rule=False, limit=8, rtol=1e-4, atol=1e-5)


def _in_order(x: torch.Tensor, order: tuple) -> torch.Tensor:
    return x.permute(order).contiguous().permute([order.index(d) for d in range(3)])


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2), (2, 3)])
def test_expanded_tensors_stay_expanded_under_every_placement(mesh_shape: tuple) -> None:
    mesh, x = init_device_mesh("cpu", mesh_shape), values(4, 1, 5)
    for placements in itertools.product((R, Shard(0), Shard(1), Shard(2)), repeat=len(mesh_shape)):
        wide = place(x, mesh, placements).expand(4, 3, 5)
        moved = (wide + 0, wide.permute(2, 0, 1) * values(5, 4, 3), wide.transpose(0, 1).reshape(3, 20), wide.sum(1))
        plain = x.expand(4, 3, 5)
        same(moved, (plain + 0, plain.permute(2, 0, 1) * values(5, 4, 3), plain.transpose(0, 1).reshape(3, 20), plain.sum(1)), "")
        for other in itertools.product((R, Shard(0), Shard(1)), repeat=len(mesh_shape)):
            target = wide.redistribute(placements=list(other))
            pieces_fit(target, ordered=True)
            same(target, plain, f"{placements} to {other}")


GRADIENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "attention in another order": lambda x: (
        F.scaled_dot_product_attention(*[x.transpose(0, 1).contiguous().view(5, 2, 1, 3).permute(1, 2, 0, 3)] * 3)
        .permute(2, 0, 1, 3)
        .contiguous()
        .view(10, 3)
    ),
    "linear of another order": lambda x: F.linear(x.transpose(0, 1), torch.ones(4, 3)).transpose(0, 1).sum(),
    "sum of a permuted one": lambda x: (x.permute(2, 0, 1) * 2).mean(),
    "norm of a permuted one": lambda x: F.layer_norm(x.permute(1, 0, 2), (3,)).sum(0),
    "convolution of permuted weights": lambda x: F.conv_transpose1d(
        torch.ones(1, 2, 4), x.transpose(1, 2).contiguous().transpose(1, 2)
    ),
}


@pytest.mark.parametrize("fn", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_that_arrive_expanded(fn: Callable) -> None:
    """The gradient of a sum is expanded; what meets it in backward is in another order."""

    def program(x: torch.Tensor) -> tuple:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = fn(x)
            out.sum().backward()
        return out.detach(), x.grad, x.grad.reshape(-1)

    check(program, values(2, 5, 3), rule=False, limit=12, rtol=1e-4, atol=1e-5)


def test_means_count_elements_and_not_devices() -> None:
    for n, ways in ((5, 4), (9, 4), (2, 3), (7, 8)):
        x = values(n, 3)
        for placement in (Shard(0), Shard(1), Shard(0, (n,) + (0,) * (ways - 1))):
            placed = place(x, init_device_mesh("cpu", ways), (placement,))
            got = placed.mean(), placed.mean(0), placed.var(), placed.std(0), placed.nanmean(), placed.sum() / placed.numel()
            same(got, (x.mean(), x.mean(0), x.var(), x.std(0), x.nanmean(), x.sum() / x.numel()), f"{n} {placement}")
