"""Autograd over global tensors: gradients equal plain ones through many operators, and autograd's switches work."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import dtorch
from dtorch import Partial, Replicate, Shard, init_device_mesh
from tests.sharding.harness import check, place, values

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule:RuntimeWarning")
R = Replicate()
MESH = init_device_mesh("cpu", (2, 2))
INDEX = torch.tensor([2, 0, 2])

OPERATORS: dict[str, Callable] = {
    "arithmetic": lambda x, y: (x * y + x / (y.abs() + 1) - 2 * x).exp(),
    "pow": lambda x, y: (x.abs() + 1) ** y,
    "where": lambda x, y: torch.where(x > y, x * 2, y * 3),
    "clamp": lambda x, y: x.clamp(-1, 1) + y.clamp_min(0),
    "matmul": lambda x, y: x @ y.t(),
    "linear": lambda x, y: F.linear(x, y, y[:, 0]),
    "softmax": lambda x, y: x.softmax(1) * y.log_softmax(0),
    "reductions": lambda x, y: x.sum(0) * y.mean(0) + x.amax(0) + y.var(0),
    "norm": lambda x, y: x.norm(dim=1) + y.pow(2).sum(1).sqrt(),
    "max with index": lambda x, y: x.max(1).values + y.min(1).values,
    "views": lambda x, y: x.t().reshape(-1)[2:].view(2, -1) + y.flatten()[: x.numel() - 2].view(2, -1),
    "cat and stack": lambda x, y: torch.cat([x, y, x]).sum(0) + torch.stack([x, y]).prod(0).sum(0),
    "split": lambda x, y: x.split(3)[1].sum() * y.chunk(2, 1)[0],
    "index": lambda x, y: x[INDEX] * y.index_select(0, INDEX),
    "gather": lambda x, y: x.gather(0, INDEX[:, None].expand(-1, 4)) + y[1],
    "masked": lambda x, y: x.masked_fill(y > 0, 0.0) + y.tril(),
    "cumsum": lambda x, y: x.cumsum(0) * y.cumsum(1),
    "sort and topk": lambda x, y: x.sort(0).values * y.topk(4, 1).values,
    "activations": lambda x, y: F.gelu(x) + F.silu(y) + F.relu(x) * y.tanh() + x.sigmoid(),
    "layer norm": lambda x, y: F.layer_norm(x, (4,), y[0], y[1]),
    "losses": lambda x, y: F.mse_loss(x, y) + F.smooth_l1_loss(x, y) + F.cross_entropy(x, INDEX.repeat(2)[:5]),
    "expand": lambda x, y: x[:, :1].expand(-1, 4) * y,
    "pad and roll": lambda x, y: F.pad(x, (1, 1)).sum(1, keepdim=True) + y.roll(1, 0),
    "einsum": lambda x, y: torch.einsum("ij,kj->ik", x, y),
    "conv": lambda x, y: F.conv1d(x[None], y[None].transpose(0, 1)[:, :, :2].expand(5, 5, 2)),
    "scaled dot product": lambda x, y: F.scaled_dot_product_attention(
        x[None, None], y[None, None], x[None, None], is_causal=True
    ),
    "embedding": lambda x, y: F.embedding(INDEX, x) * y[0],
    "in place": lambda x, y: (x * 1).mul_(y).add_(1).sigmoid_(),
    "write to a view": lambda x, y: _written(x * 1, y),
}


def _written(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z[1:3] = y[0]
    z[:, 0].mul_(2)
    z.t()[1].add_(y[:, 1])
    return z


@pytest.mark.parametrize("fn", OPERATORS.values(), ids=OPERATORS)
def test_gradients_equal_plain_ones(fn: Callable) -> None:
    check(fn, values(5, 4), values(5, 4, seed=1), grad=True, rule=False, meshes=((3,), (2, 2)), limit=10, rtol=1e-4, atol=1e-5)


def test_a_backward_from_a_given_gradient() -> None:
    x = place(values(5, 4), MESH, (Shard(0), R)).requires_grad_()
    for grad in (torch.ones(5, 4), dtorch.ones(5, 4, device_mesh=MESH, placements=[R, Shard(1)])):
        x.grad = None
        (x * 3).backward(grad)
        assert x.grad.to_torch().eq(3).all()


def test_gradients_accumulate() -> None:
    x = place(values(5, 4), MESH, (Shard(0), R)).requires_grad_()
    for _ in range(3):
        (x.redistribute(placements=[R, Shard(1)]) * 2).sum().backward()
    assert x.grad.to_torch().eq(6).all()
    x.grad.zero_()
    assert x.grad.to_torch().eq(0).all()


def test_higher_derivatives() -> None:
    check(
        lambda x: torch.autograd.grad((x**3).sum(), x, create_graph=True)[0].sum() if x.requires_grad else x.sum() * 0,
        values(3, 2),
        rule=False,
        limit=10,
    )
    x = place(values(3), init_device_mesh("cpu", 2), (Shard(0),)).requires_grad_()
    hessian = torch.autograd.functional.hessian(lambda t: (t**3).sum(), x)
    assert torch.allclose(hessian.to_torch(), torch.diag(6 * values(3)))


def test_no_grad_and_enable_grad() -> None:
    x = place(values(4), init_device_mesh("cpu", 2), (Shard(0),)).requires_grad_()
    with torch.no_grad():
        y = x * 2
        assert not y.requires_grad and not x.redistribute(placements=[R]).requires_grad
        x.mul_(1)
        with torch.enable_grad():
            assert (x * 2).requires_grad
    assert x.detach().requires_grad is False and (x * 2).requires_grad
    with pytest.raises(RuntimeError, match="leaf Variable"):
        x.mul_(2)


def test_inference_mode() -> None:
    x = place(values(4, 2), init_device_mesh("cpu", 2), (Shard(0),)).requires_grad_()
    with torch.inference_mode():
        y = (x @ x.t()).redistribute(placements=[R])
        assert not y.requires_grad and torch.allclose(y.to_torch(), values(4, 2) @ values(4, 2).t())
        y[0] = 1.0
        y.add_(1)
        assert y[0, 0].item() == 2.0
        made = dtorch.ones(3, device_mesh=init_device_mesh("cpu", 2), placements=[Shard(0)])
        assert made.view(1, 3).t().tolist() == [[1.0]] * 3
    assert (x * 2).requires_grad and torch.equal(y.to_torch() * 2, (y * 2).to_torch())


def test_autocast_is_as_in_torch() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> tuple:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = F.linear(x, y)
            return z, z.softmax(-1), (z + x[:, :1]).sum()

    plain = program(values(5, 4), values(6, 4, seed=1))
    placed = program(place(values(5, 4), MESH, (Shard(0), R)), place(values(6, 4, seed=1), MESH, (R, Shard(0))))
    for a, b in zip(placed, plain, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a.to_torch(), b)
    assert plain[0].dtype == torch.bfloat16


def test_autocast_gradients() -> None:
    def gradient(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.linear(x, x).float().sum()
        loss.backward()
        return x.grad

    plain = gradient(values(5, 4))
    placed = gradient(place(values(5, 4), MESH, (Shard(0), R)))
    assert placed.dtype == plain.dtype == torch.float32
    torch.testing.assert_close(placed.to_torch(), plain)


def test_hooks_and_retained_gradients() -> None:
    seen = []
    x = place(values(4), init_device_mesh("cpu", 2), (Shard(0),)).requires_grad_()
    y = x * 3
    y.retain_grad()
    x.register_hook(lambda g: seen.append(g) or g * 2)
    x.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    y.sum().backward()
    assert y.grad.to_torch().eq(1).all() and x.grad.to_torch().eq(6).all() and len(seen) == 2


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 2 + x * 0


def test_custom_autograd_functions() -> None:
    check(Doubled.apply, values(5, 4), grad=True, rule=False)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_with_dropout(reentrant: bool) -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        return F.dropout((x * 2).tanh(), 0.4) @ x.t()

    def gradient(x: torch.Tensor, checkpointed: bool) -> torch.Tensor:
        x = x.detach().requires_grad_()
        torch.manual_seed(5)
        y = checkpoint(block, x, use_reentrant=reentrant) if checkpointed else block(x)
        y.pow(2).sum().backward()
        return x.grad

    plain = gradient(values(5, 4), False)
    for placements in ((Shard(0), R), (R, R), (Partial(), Shard(1))):
        torch.testing.assert_close(gradient(place(values(5, 4), MESH, placements), True).to_torch(), plain)


def test_gradients_of_plain_and_global_leaves_together() -> None:
    plain, placed = values(4).requires_grad_(), place(values(4, seed=1), init_device_mesh("cpu", 2), (Shard(0),)).requires_grad_()
    (plain * placed).sum().backward()
    assert placed.grad.to_torch().equal(values(4)) and torch.equal(
        torch.as_tensor(plain.grad.to_torch() if isinstance(plain.grad, dtorch.Tensor) else plain.grad), values(4, seed=1)
    )


def test_saved_tensors_that_were_written_are_noticed() -> None:
    x = place(values(4), init_device_mesh("cpu", 2), (Shard(0),)).requires_grad_()
    y = x.exp()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_anomaly_mode_and_grad_of_an_unused_input() -> None:
    x, y = (place(values(4, seed=s), init_device_mesh("cpu", 2), (Shard(0),)).requires_grad_() for s in (0, 1))
    assert torch.autograd.grad((x * 2).sum(), [x, y], allow_unused=True)[1] is None
    assert torch.autograd.grad((x * 2).sum(), [x, y], materialize_grads=True)[1].to_torch().eq(0).all()


def test_forward_mode_and_functional_transforms_of_torch_func() -> None:
    x = place(values(4), init_device_mesh("cpu", 2), (Shard(0),))
    jacobian = torch.autograd.functional.jacobian(lambda t: t**2, x)
    assert torch.allclose(jacobian.to_torch(), torch.diag(2 * values(4)))
