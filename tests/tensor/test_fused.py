"""Fused optimizers: each parameter's step where it lies, over several meshes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import dtorch
from dtorch import Partial, Replicate, Shard, explain, init_device_mesh
from dtorch.core.placements import Placement
from tests.sharding.harness import place, values

R = Replicate()
GRID = init_device_mesh("cpu", (2, 3))
LINE = init_device_mesh("cpu", (2,))
HOMES: list[tuple[Any, tuple[Placement, ...]]] = [
    (GRID, (Shard(0), Shard(1))),
    (GRID, (Shard(0, (1, 6)), R)),
    (LINE, (Shard(0),)),
    (GRID, (R, R)),
]
SHAPES = [(7, 5), (7,), (1,), ()]
KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {"amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "adamw by tensor": (torch.optim.AdamW, {"lr": torch.tensor(0.1)}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
}


def parameters() -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    plain = [nn.Parameter(values(*s, seed=i)) for i, s in enumerate(SHAPES)]
    return plain, [nn.Parameter(place(p.detach(), *home)) for p, home in zip(plain, HOMES, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("partial", [False, True])
def test_steps(kind: str, partial: bool) -> None:
    plain, placed = parameters()
    made, options = KINDS[kind]
    optimizers = [made(ps, **{"lr": 0.1, **copy.deepcopy(options)}, fused=True) for ps in (plain, placed)]
    for step in range(3):
        for i, (p, q) in enumerate(zip(plain, placed, strict=True)):
            p.grad = values(*p.shape, seed=10 * step + i)
            home = (Partial(),) * q.device_mesh.ndim if partial else q.placements
            q.grad = place(p.grad, q.device_mesh, home)
        with explain() as report:
            for optimizer in optimizers:
                optimizer.step()
        assert partial or report.events == []
        assert report.replicated == {}
    for p, q, (_, home) in zip(plain, placed, HOMES, strict=True):
        assert q.placements == home
        torch.testing.assert_close(q.to_torch(), p.detach())
        for a, b in zip(optimizers[0].state[p].values(), optimizers[1].state[q].values(), strict=True):
            torch.testing.assert_close(b.to_torch() if isinstance(b, dtorch.Tensor) else b, a)


@pytest.mark.filterwarnings("ignore:.*has no sharding rule:RuntimeWarning")
def test_one_without_a_rule_is_right_too() -> None:
    plain, placed = parameters()
    optimizers = [torch.optim.Adagrad(ps, lr=0.1, fused=True) for ps in (plain, placed)]
    for _ in range(2):
        for p, q in zip(plain, placed, strict=True):
            p.grad = values(*p.shape)
            q.grad = place(p.grad, q.device_mesh, q.placements)
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(plain, placed, strict=True):
        torch.testing.assert_close(q.to_torch(), p.detach())


@pytest.mark.parametrize("found", [0.0, 1.0])
@pytest.mark.parametrize("home", [(Shard(0),), (R,)])
def test_scaled_gradients(found: float, home: tuple[Placement, ...]) -> None:
    plain, placed = (nn.Parameter(t) for t in (values(5, 2), place(values(5, 2), LINE, (Shard(0),))))
    grad = values(5, 2, seed=1)
    for p, g in ((plain, grad.clone()), (placed, place(grad, LINE, home))):
        p.grad = g
        optimizer = torch.optim.AdamW([p], lr=0.1, fused=True)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(found)  # type: ignore[attr-defined]
        optimizer.step()
    torch.testing.assert_close(placed.to_torch(), plain.detach())
    torch.testing.assert_close(placed.grad.to_torch(), plain.grad)
