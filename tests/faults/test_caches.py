"""Plans: none is made anew for what does not matter, none is shared by what does, and their number stays bounded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import Partial, Replicate, Shard, init_device_mesh
from dtorch.testing.sessions import own_session
from tests.sharding.harness import place, same, values

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule:RuntimeWarning")
R = Replicate()
LINE, GRID = init_device_mesh("cpu", 3), init_device_mesh("cpu", (2, 2))
HOMES = [(LINE, (Shard(0),)), (LINE, (Shard(1),)), (GRID, (Shard(1), Shard(0))), (LINE, (R,))]

IN_TURN: dict[str, tuple[Callable, list]] = {
    "topk": (lambda x, k: x.topk(k, 1).values, [2, 5, 1, 7]),
    "histc": (lambda x, n: torch.histc(x, n, -2, 2), [10, 4, 10]),
    "sum": (lambda x, d: x.sum(d), [0, 1, -1, (0, 1)]),
    "keepdim": (lambda x, k: x.amax(1, keepdim=k), [True, False, True]),
    "roll": (lambda x, n: x.roll(n, 0), [1, 2, -1]),
    "narrow": (lambda x, n: x.narrow(0, n, 2), [0, 1, 3]),
    "dtype": (lambda x, d: x.sum(dtype=d), [torch.float64, torch.float32, torch.bfloat16]),
    "causal": (lambda x, c: F.scaled_dot_product_attention(*[x.view(1, 1, 5, 7)] * 3, is_causal=c), [True, False, True]),
    "scale": (lambda x, s: F.scaled_dot_product_attention(*[x.view(1, 1, 5, 7)] * 3, scale=s), [0.5, 2.0, 0.5]),
    "threshold": (lambda x, t: F.threshold(x, t, t), [0.5, -0.5, 0.0]),
    "reduction": (lambda x, r: F.mse_loss(x, x * 0, reduction=r), ["mean", "sum", "none"]),
    "approximation": (lambda x, a: F.gelu(x, approximate=a), ["none", "tanh", "none"]),
    "numbers of every kind": (lambda x, n: x * n + n, [1, 1.0, True, 2, 0.0, -0.0, float("inf")]),
    "rounding": (lambda x, m: torch.div(x, 0.3, rounding_mode=m), ["floor", "trunc", None]),
    "largest": (lambda x, b: x.topk(2, largest=b).values, [True, False]),
    "descending": (lambda x, b: x.sort(0, descending=b).values, [True, False]),
    "exclusive": (lambda x, c: x.std(0, correction=c), [0, 1, 2]),
    "order": (lambda x, p: torch.linalg.vector_norm(x, p), [1, 2, float("inf"), 0]),
    "padding": (lambda x, v: F.pad(x, (1, 1), value=v), [0.0, 2.0, -1.0]),
    "a list of numbers": (lambda x, s: x.split(s)[0], [[2, 3], [1, 4], [5]]),
    "a number in a key": (lambda x, i: x[i], [0, 3, -1]),
    "alpha": (lambda x, a: torch.add(x, x, alpha=a), [1, 2, 0.5]),
}


@pytest.mark.parametrize("home", HOMES, ids=str)
@pytest.mark.parametrize("name", IN_TURN)
def test_arguments_in_turn_do_not_mix(name: str, home: tuple) -> None:
    fn, arguments = IN_TURN[name]
    plain, placed = values(5, 7, distinct=True), place(values(5, 7, distinct=True), *home)
    for argument in [*arguments, *arguments]:
        same(fn(placed, argument), fn(plain, argument), f"{name} {argument} {home}")


def test_gradients_do_not_take_the_plan_of_other_flags() -> None:
    """Attention with and without a gradient, in turn, through one cache."""
    q = values(1, 2, 5, 4)
    for wanted in (False, True, False, True):
        got = []
        for t in (q, place(q, LINE, (Shard(1),))):
            t = t.detach().requires_grad_(wanted)
            out = F.scaled_dot_product_attention(t, t, t, is_causal=True)
            if wanted:
                out.pow(2).sum().backward()
            got.append((out.detach(), t.grad))
        same(got[1][0], got[0][0], "forward")
        if wanted:
            same(got[1][1], got[0][1], "gradient", rtol=1e-4, atol=1e-5)


def steps(make: Callable, count: int) -> list[int]:
    """Plans made in each step of an optimizer with a schedule."""
    with own_session() as (client, _):
        params = [torch.nn.Parameter(place(values(5, 4, seed=i), LINE, (p,))) for i, p in enumerate((Shard(0), Shard(1), R))]
        optimizer = make(params)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        counts = []
        for step in range(count):
            for p in params:
                p.grad = place(values(5, 4, seed=step), LINE, (Shard(0),))
            torch.nn.utils.clip_grad_norm_(params, 1.0 + step / 7)
            optimizer.step()
            schedule.step()
            counts.append(client.planned)
    return counts


OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.1),
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=True),
    "adamw one by one": lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=False),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1, lr_decay=0.1),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.1),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.1),
    "radam": lambda ps: torch.optim.RAdam(ps, lr=0.1),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_steps_of_an_optimizer_make_no_new_plans(make: Callable) -> None:
    counts = steps(make, 12)
    assert counts[7:] == counts[7:8] * 5, counts


def test_losses_and_masks_of_changing_values_make_no_new_plans() -> None:
    with own_session() as (client, _):
        x, planned = place(values(5, 7), LINE, (Shard(0),)), []
        for step in range(8):
            y = x.clamp(-1 - step, 1 + step).masked_fill(x > step / 4, float(step)) * (1 + step / 3)
            y = torch.where(y > 0, y, -0.5 * step).add(y, alpha=0.1 * step) / (step + 1) + step
            F.leaky_relu(y, 0.1 * step).pow(2).mean()
            planned.append(client.planned)
        assert planned[3:] == planned[3:4] * 5, planned


def test_many_layouts_of_one_operator_are_planned_one_by_one() -> None:
    """On four axes an operator's choices are settled axis by axis: each layout is right, and planned once."""
    mesh = init_device_mesh("cpu", (2, 2, 2, 2))
    x, y = values(6, 5), values(5, 6, seed=1)
    for a in ([Shard(0), R, Shard(1), R], [R, Shard(1), Shard(0), Shard(0)], [Partial(), R, Shard(1), Shard(0)], [Shard(0)] * 4):
        for b in ([R, R, Shard(0), Shard(1)], [Shard(1), Shard(0), R, Partial()]):
            left, right = place(x, mesh, tuple(a)), place(y, mesh, tuple(b))
            same(left @ right, x @ y, f"{a} {b}")
            before = dtorch.session().planned
            left @ right
            assert dtorch.session().planned == before
