"""Optimizers' fused kernels and the scaling of losses: where parameters lie, and to the values of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dtorch
from dtorch import DeviceMesh, Partial, Replicate, Shard, explain, init_device_mesh
from dtorch.core.placements import Placements
from tests.sharding.harness import MESHES, place, placements_of, values

R = Replicate()
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": lambda p, **k: torch.optim.Adam(p, **{"lr": 0.1, **k}),
    "AMSGrad": lambda p, **k: torch.optim.Adam(p, amsgrad=True, weight_decay=0.1, maximize=True, **{"lr": 0.1, **k}),
    "AdamW": lambda p, **k: torch.optim.AdamW(p, **{"lr": 0.1, **k}),
    "SGD": lambda p, **k: torch.optim.SGD(p, **{"lr": 0.1, **k}),
    "momentum": lambda p, **k: torch.optim.SGD(p, momentum=0.9, nesterov=True, weight_decay=0.1, **{"lr": 0.1, **k}),
    "Adagrad": lambda p, **k: torch.optim.Adagrad(p, lr_decay=0.1, weight_decay=0.1, **{"lr": 0.1, **k}),
}
HOMES: list[tuple[DeviceMesh, Placements]] = [
    (init_device_mesh("cpu", shape), p) for shape in MESHES for p in placements_of(init_device_mesh("cpu", shape), values(5, 4))
]


def stepped(make: Any, parameter: torch.Tensor, grads: list[torch.Tensor], **options: Any) -> tuple[Any, list[torch.Tensor]]:
    """The parameter after a step for each gradient, and the optimizer's state."""
    optimizer = make([parameter], fused=True, **options)
    for number, grad in enumerate(grads):
        parameter.grad = grad
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * (1 if number else 0.5)
        optimizer.step()
    return parameter, [v for v in optimizer.state[parameter].values() if isinstance(v, torch.Tensor)]


def assert_same(ours: Any, plain: Any) -> None:
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a.detach().to_torch() if isinstance(a, dtorch.Tensor) else a, b.detach())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps(name: str) -> None:
    grads = [values(5, 4, seed=1), values(5, 4, seed=2)]
    plain, state = stepped(OPTIMIZERS[name], nn.Parameter(values(5, 4)), grads)
    for number, (mesh, placements) in enumerate(HOMES):
        others = HOMES[(7 * number) % len(HOMES)]
        elsewhere = others[1] if others[0] is mesh else placements
        with explain() as report:
            parameter = nn.Parameter(place(values(5, 4), mesh, placements))
            before = parameter._spec
            ours, own_state = stepped(OPTIMIZERS[name], parameter, [place(g, mesh, elsewhere) for g in grads])
        assert not report.replicated and ours._spec is before
        assert_same([ours, *own_state], [plain, *state])
        assert_same([ours.grad], [grads[-1]])


@pytest.mark.parametrize("name", ["Adam", "AdamW", "momentum"])
def test_a_rate_in_a_tensor(name: str) -> None:
    grads = [values(5, 4, seed=1)]
    plain, state = stepped(OPTIMIZERS[name], nn.Parameter(values(5, 4)), grads, lr=torch.tensor(0.1))
    mesh = init_device_mesh("cpu", 3)
    parameter = nn.Parameter(place(values(5, 4), mesh, (Shard(1),)))
    ours, own_state = stepped(OPTIMIZERS[name], parameter, [place(g, mesh, (Shard(0),)) for g in grads], lr=torch.tensor(0.1))
    assert_same([ours, *own_state], [plain, *state])


def test_nothing_moves_and_another_rate_makes_no_plan() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for make in OPTIMIZERS.values():
        parameter = nn.Parameter(place(values(5, 4), mesh, (Shard(1), Shard(0))))
        grads = [place(values(5, 4, seed=i), mesh, (Shard(1), Shard(0))) for i in range(3)]
        with explain() as report:
            optimizer, planned = make([parameter], fused=True), []
            for grad in grads:
                parameter.grad = grad
                optimizer.step()
                optimizer.param_groups[0]["lr"] *= 0.9
                planned.append(dtorch.session().planned)
        assert not report.events and not report.replicated
        # SGD's first step is told that it is the first.
        assert planned[1] == planned[2]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
def test_scaled_losses(bad: float | None, fused: bool) -> None:
    here, there = init_device_mesh("cpu", (2, 2)), DeviceMesh("cpu", [4, 5, 6])
    first, second = values(5, 4), values(3, 6, seed=1)
    slopes = values(5, 4, seed=2), values(3, 6, seed=3)
    if bad is not None:
        slopes[1][2, 5] = bad

    def run(parameters: list[torch.Tensor], slopes: list[torch.Tensor]) -> list[Any]:
        optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        for _ in range(2):
            for p, slope in zip(parameters, slopes, strict=True):
                p.grad = slope * scaler.scale(torch.ones(()))
            if not fused:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return [*parameters, *[p.grad for p in parameters], torch.tensor(scaler.get_scale())]

    plain = run([nn.Parameter(first.clone()), nn.Parameter(second.clone())], slopes)
    for q in ((R,), (Shard(0),), (Shard(1, (0, 5, 1)),), (Partial(),)):
        if q == (Partial(),) and bad is not None:
            continue
        p = (Shard(0), Shard(1))
        ours = [nn.Parameter(place(first, here, p)), nn.Parameter(place(second, there, (Shard(1),)))]
        with explain() as report:
            result = run(ours, [place(slopes[0], here, p), place(slopes[1], there, q)])
        assert not report.replicated
        torch.testing.assert_close([t.detach().to_torch() for t in result[:4]], [t.detach() for t in plain[:4]], equal_nan=True)
        assert result[4] == plain[4]
