"""Pending sums meet numbers, other sums, and operators that are not linear; nothing is read or used before it is reduced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import Partial, Replicate, Shard, init_device_mesh
from tests.sharding.harness import check, place, same, values

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule:RuntimeWarning")
R = Replicate()
LINE, GRID = init_device_mesh("cpu", 3), init_device_mesh("cpu", (2, 2))
OPS = ("sum", "avg", "max", "min", "prod")
HOMES = [
    *[(LINE, (Partial(op),)) for op in OPS],
    (GRID, (Partial(), Shard(0))),
    (GRID, (Shard(1), Partial("avg"))),
    (GRID, (Partial(), Partial())),
    (GRID, (Partial("max"), Partial())),
]

PROGRAMS: dict[str, Callable[[torch.Tensor], object]] = {
    "with numbers": lambda x: (x + 1, 1 - x, x * 2, x / 4, x // 2, x % 3, x**2, 2**x, -x, x > 0, x == 1, x * True),
    "with itself": lambda x: (x + x, x - x, x * x, x / (x.abs() + 1), torch.maximum(x, x * 2), torch.where(x > 0, x, -x)),
    "with plain": lambda x: (x + torch.ones(3), x * torch.arange(3), torch.ones(5, 1) - x, torch.cat([x, torch.ones(1, 3)])),
    "not linear": lambda x: (x.relu(), x.exp(), x.abs(), x.clamp(-1, 1), x.sigmoid(), x.sign(), x.round(), F.gelu(x), x.isnan()),
    "reduced": lambda x: (x.sum(), x.mean(0), x.amax(), x.min(1).values, x.norm(), x.argmax(0), x.prod(0), x.std(), x.any()),
    "read": lambda x: (x.tolist(), float(x.sum()), x[1, 2].item(), bool((x > 0).any()), [r.sum().item() for r in x]),
    "moved": lambda x: (
        x.t(),
        x.view(-1),
        x[1:, ::2],
        x.flip(0),
        x.roll(1, 1),
        x.expand(2, 5, 3),
        x.chunk(2),
        torch.stack([x, x]),
    ),
    "cast": lambda x: (x.double(), x.long(), x.bool(), x.bfloat16().float(), x.half() + 1, x.to(torch.complex64)),
    "multiplied": lambda x: (x @ torch.ones(3, 2), x @ x.t(), torch.ones(2, 5) @ x, F.linear(x, torch.ones(4, 3), torch.ones(4))),
    "written": lambda x: _written(x.clone()),
    "sorted": lambda x: (x.sort(0).values, x.topk(2).values, x.cumsum(0), x.unique(), x.median(1).values, torch.nonzero(x > 0)),
    "normalised": lambda x: (x.softmax(0), F.layer_norm(x, (3,)), x.log_softmax(1), F.normalize(x + 9)),
    "indexed": lambda x: (x[[0, 2]], x[x > 0], x.gather(0, torch.tensor([[4, 0, 1]])), x.take(torch.tensor([3])), x[-1]),
    "filled": lambda x: (x.masked_fill(x > 0, 1), F.pad(x, (1, 1), value=2.0), torch.zeros_like(x) + x, torch.full_like(x, 2)),
    "lerp and fused": lambda x: (torch.lerp(x, x * 2, 0.5), torch.addcmul(x, x, x), torch.addcdiv(x, x, x.abs() + 1, value=2)),
    "written into": lambda x: (
        torch.ones(5, 3).copy_(x),
        torch.ones(5, 3).add_(x),
        torch.ones(5, 3).index_add_(0, torch.arange(5), x),
    ),
    "complex": lambda x: (torch.complex(x, x).abs(), torch.view_as_real(torch.complex(x, x * 2)), torch.fft.fft(x, dim=0).abs()),
    "scaled in turn": lambda x: [x.mean() * k + k for k in (1, 2, 3)],
}


def _written(z: torch.Tensor) -> tuple:
    z.add_(1)
    z[0] = 2.0
    z.t()[1].mul_(3)
    z.relu_()
    z.view(-1)[::4] += 1
    return z, z.sum()


@pytest.mark.parametrize("fn", PROGRAMS.values(), ids=PROGRAMS)
def test_pending_reductions_are_not_taken_for_values(fn: Callable) -> None:
    for home in HOMES:
        same(fn(place(values(5, 3), *home)), fn(values(5, 3)), str(home), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("other", [R, Shard(0), Shard(1), Partial(), Partial("max")], ids=str)
@pytest.mark.parametrize("one", [Partial(op) for op in OPS], ids=str)
def test_sums_meet_other_placements(one: Partial, other: object) -> None:
    a, b = values(5, 3), values(5, 3, seed=1)
    x, y = place(a, LINE, (one,)), place(b, LINE, (other,))
    for fn in (torch.add, torch.sub, torch.mul, torch.maximum, lambda p, q: p @ q.t(), lambda p, q: torch.cat([p, q])):
        same(fn(x, y), fn(a, b), f"{one} {other}")
        same(fn(y, x), fn(b, a), f"{other} {one}")


@pytest.mark.parametrize("home", HOMES, ids=str)
def test_gradients_of_pending_reductions(home: tuple) -> None:
    grads = []
    for x in (values(5, 3), place(values(5, 3), *home)):
        x = x.detach().requires_grad_()
        y = x * 2 + 1
        (y.tanh().sum() + (y @ y.t()).mean() + y[1:].amax() + y.view(-1)[::2].pow(2).sum()).backward()
        grads.append(x.grad)
    same(grads[1], grads[0], str(home), rtol=1e-4, atol=1e-5)


def test_a_cast_to_a_wider_dtype_keeps_what_each_device_has() -> None:
    """Reduced first and cast then, or cast first: the sum of the parts in the wider dtype is as near to the whole as either."""
    parts = [torch.tensor([256.0], dtype=torch.bfloat16), torch.tensor([1.0], dtype=torch.bfloat16)]
    x = dtorch.from_local(parts, init_device_mesh("cpu", 2), [Partial()])
    assert x.float().item() in (256.0, 257.0)
    assert x.item() in (256.0, 258.0)


def test_mixed_reductions_reduce_in_their_order() -> None:
    check(
        lambda x: (x * 1, x.view(-1), x + 1, x.to(torch.float64)),
        values(5, 3),
        partial=OPS,
        rule=False,
        limit=40,
        meshes=((2, 3), (2, 2)),
    )
