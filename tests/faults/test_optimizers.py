"""Optimizers and clipping over parameters of several meshes and placements, and plain ones among them, in one list."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

import dtorch
from dtorch import DeviceMesh, Partial, Replicate, Shard, init_device_mesh
from tests.sharding.harness import place, values

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule:RuntimeWarning")
R = Replicate()
LINE, GRID, FAR = init_device_mesh("cpu", 3), init_device_mesh("cpu", (2, 2)), DeviceMesh("cpu", [8, 9])
SHAPES = ((5, 4), (7,), (2, 3), ())
# The home of each parameter, and the placement of its gradient; None is a plain tensor.
HOMES: dict[str, Sequence] = {
    "one mesh": [
        (LINE, (Shard(0),), (Shard(0),)),
        (LINE, (Shard(0),), (R,)),
        (LINE, (Shard(1),), (Partial(),)),
        (LINE, (R,), (R,)),
    ],
    "two axes": [
        (GRID, (Shard(0), Shard(1)), (Partial(), Shard(1))),
        (GRID, (Shard(0), Shard(0)), (Shard(0), R)),
        (GRID, (R, Shard(0)), (Shard(1), Shard(0))),
        (GRID, (R, R), (Partial(), R)),
    ],
    "two meshes": [(LINE, (Shard(0),), (R,)), (FAR, (Shard(0),), (Partial(),)), (GRID, (R, Shard(1)), (R, R)), (FAR, (R,), (R,))],
    "plain and global": [None, (LINE, (Shard(0),), (R,)), (LINE, (Shard(1),), (Shard(0),)), None],
    "plain and two meshes": [(LINE, (Shard(0),), (R,)), None, (FAR, (Shard(1),), (Shard(0),)), (LINE, (R,), (R,))],
}
SGD, ADAM, ADAMW, ADAGRAD = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad
OPTIMIZERS: dict[str, Callable] = {
    "sgd": lambda ps, **k: SGD(ps, lr=0.1, **k),
    "sgd with momentum": lambda ps, **k: SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, **k),
    "adam": lambda ps, **k: ADAM(ps, lr=0.1, **k),
    "adam amsgrad": lambda ps, **k: ADAM(ps, lr=0.1, amsgrad=True, weight_decay=0.1, **k),
    "adamw": lambda ps, **k: ADAMW(ps, lr=0.1, **k),
    "adagrad": lambda ps, **k: ADAGRAD(ps, lr=0.1, initial_accumulator_value=0.1, **k),
}
MORE: dict[str, Callable] = {
    "rmsprop": lambda ps, **k: torch.optim.RMSprop(ps, lr=0.1, momentum=0.5, **k),
    "nadam": lambda ps, **k: torch.optim.NAdam(ps, lr=0.1, **k),
    "radam": lambda ps, **k: torch.optim.RAdam(ps, lr=0.1, **k),
    "adamax": lambda ps, **k: torch.optim.Adamax(ps, lr=0.1, **k),
    "adadelta": lambda ps, **k: torch.optim.Adadelta(ps, lr=0.1, **k),
    "asgd": lambda ps, **k: torch.optim.ASGD(ps, lr=0.1, **k),
    "rprop": lambda ps, **k: torch.optim.Rprop(ps, lr=0.1, **k),
    "adafactor": lambda ps, **k: torch.optim.Adafactor(ps, lr=0.1, **k),
}
WAYS = {"foreach": {"foreach": True}, "fused": {"fused": True}, "one by one": {"foreach": False}}


def parameters(homes: Sequence) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The same parameters, plain and each in its home."""
    plain = [nn.Parameter(values(*s, seed=i)) for i, s in enumerate(SHAPES)]
    placed = [
        nn.Parameter(p.detach().clone() if home is None else place(p, home[0], home[1]))
        for p, home in zip(plain, homes, strict=True)
    ]
    return plain, placed


def give_gradients(plain: Sequence, placed: Sequence, homes: Sequence, step: int) -> None:
    for i, (p, q, home) in enumerate(zip(plain, placed, homes, strict=True)):
        p.grad = values(*p.shape, seed=20 + i + 7 * step)
        q.grad = p.grad.clone() if home is None else place(p.grad, home[0], home[2])


def assert_alike(plain: Sequence, placed: Sequence, homes: Sequence) -> None:
    for p, q, home in zip(plain, placed, homes, strict=True):
        assert (home is None) == (not isinstance(q, dtorch.Tensor))
        torch.testing.assert_close(whole(q), p.detach())
        assert home is None or (q.device_mesh, q.placements) == (home[0], tuple(home[1]))


def whole(t: torch.Tensor) -> torch.Tensor:
    return t.detach().to_torch() if isinstance(t, dtorch.Tensor) else t.detach()


def steps_alike(make: Callable, homes: Sequence, steps: int = 2, **options: object) -> None:
    plain, placed = parameters(homes)
    optimizers = make(plain, **options), make(placed, **options)
    for step in range(steps):
        give_gradients(plain, placed, homes, step)
        for optimizer in optimizers:
            optimizer.step()
    assert_alike(plain, placed, homes)


@pytest.mark.parametrize("homes", HOMES.values(), ids=HOMES)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_steps_are_those_of_plain_parameters(make: Callable, way: dict, homes: Sequence) -> None:
    steps_alike(make, homes, **way)


@pytest.mark.parametrize("homes", [HOMES["plain and two meshes"]], ids=["plain and two meshes"])
@pytest.mark.parametrize("make", MORE.values(), ids=MORE)
def test_other_optimizers(make: Callable, homes: Sequence) -> None:
    for foreach in (True, False):
        steps_alike(make, homes, foreach=foreach)


@pytest.mark.parametrize("homes", HOMES.values(), ids=HOMES)
@pytest.mark.parametrize("kind", [ADAM, ADAMW, SGD], ids=["adam", "adamw", "sgd"])
def test_a_rate_that_is_a_tensor(kind: type, homes: Sequence) -> None:
    steps_alike(lambda ps, **k: kind(ps, lr=torch.tensor(0.1), **k), homes, foreach=False)
    steps_alike(lambda ps, **k: kind(ps, lr=torch.tensor(0.1), **k), homes, fused=True)


@pytest.mark.parametrize("homes", HOMES.values(), ids=HOMES)
def test_a_rate_that_is_a_global_tensor(homes: Sequence) -> None:
    plain, placed = parameters(homes)
    rate = place(torch.tensor(0.1), LINE, (R,))
    optimizers = ADAM(plain, lr=torch.tensor(0.1), foreach=False), ADAM(placed, lr=rate, foreach=False)
    for step in range(2):
        give_gradients(plain, placed, homes, step)
        for optimizer in optimizers:
            optimizer.step()
    assert_alike(plain, placed, homes)


@pytest.mark.parametrize("homes", HOMES.values(), ids=HOMES)
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_by_norm(norm_type: float, foreach: bool | None, homes: Sequence) -> None:
    plain, placed = parameters(homes)
    give_gradients(plain, placed, homes, 0)
    expected = nn.utils.clip_grad_norm_(plain, 0.5, norm_type, foreach=foreach)
    total = nn.utils.clip_grad_norm_(placed, 0.5, norm_type, foreach=foreach)
    torch.testing.assert_close(whole(total), expected)
    assert float(total) == pytest.approx(float(expected)) and bool(total > 0.5)
    assert_alike([p.grad for p in plain], [q.grad for q in placed], [h and (h[0], h[2]) for h in homes])


@pytest.mark.parametrize("homes", HOMES.values(), ids=HOMES)
@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_by_value(foreach: bool | None, homes: Sequence) -> None:
    plain, placed = parameters(homes)
    give_gradients(plain, placed, homes, 0)
    for ps in (plain, placed):
        nn.utils.clip_grad_value_(ps, 0.25, foreach=foreach)
    assert_alike([p.grad for p in plain], [q.grad for q in placed], [h and (h[0], h[2]) for h in homes])


@pytest.mark.parametrize("homes", HOMES.values(), ids=HOMES)
@pytest.mark.parametrize("make", [OPTIMIZERS["sgd with momentum"], OPTIMIZERS["adam"]], ids=["sgd", "adam"])
def test_the_state_of_an_optimizer_goes_out_and_in(make: Callable, homes: Sequence) -> None:
    """Plain state into an optimizer of global parameters and back: the next step is the same."""
    plain, placed = parameters(homes)
    first, second = make(plain), make(placed)
    give_gradients(plain, placed, homes, 0)
    first.step()
    with torch.no_grad():
        for p, q in zip(plain, placed, strict=True):
            q.copy_(p)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    give_gradients(plain, placed, homes, 1)
    for optimizer in (first, second):
        optimizer.step()
    assert_alike(plain, placed, homes)
    again = make(plain)
    again.load_state_dict(copy.deepcopy(second.state_dict()))
    give_gradients(plain, placed, homes, 2)
    for optimizer in (again, second):
        optimizer.step()
    assert_alike(plain, placed, homes)


def test_state_made_by_shape_meets_its_parameter() -> None:
    """An optimizer that makes its moments by ``torch.zeros(p.shape)`` gets plain ones, and they take part all the same."""
    plain, placed = parameters(HOMES["one mesh"])
    moments = [[torch.zeros(p.shape) for p in ps] for ps in (plain, placed)]
    for step in range(2):
        give_gradients(plain, placed, HOMES["one mesh"], step)
        for ps, ms in zip((plain, placed), moments, strict=True):
            with torch.no_grad():
                for p, m in zip(ps, ms, strict=True):
                    m.mul_(0.9).add_(p.grad)
                    p.add_(m, alpha=-0.1)
    assert_alike(plain, placed, HOMES["one mesh"])
    for m, n in zip(*moments, strict=True):
        torch.testing.assert_close(whole(n), m)


@pytest.mark.parametrize("homes", HOMES.values(), ids=HOMES)
@pytest.mark.parametrize("bad", [None, 0, 2])
def test_scaled_gradients(bad: int | None, homes: Sequence) -> None:
    """A gradient scaler unscales, or passes over the step where one gradient is not finite."""
    plain, placed = parameters(homes)
    scales = []
    for ps in (plain, placed):
        optimizer, scaler = SGD(ps, lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
        loss = scaler.scale(torch.ones(()))
        assert loss.item() == 8
        give_gradients(plain, ps, homes if ps is placed else [None] * len(ps), 0)
        if bad is not None:
            with torch.no_grad():
                ps[bad].grad[1] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales[0] == scales[1] == (8.0 if bad is None else 4.0)
    assert_alike(plain, placed, homes)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_fused_step_moves_nothing_and_plans_once(make: Callable) -> None:
    """Parameter, gradient and moments lie alike: each device updates its piece, whatever the rate of this step."""
    homes = [(LINE, (Shard(0),), (Shard(0),))] * 2 + [(GRID, (Shard(1), Shard(0)), (Shard(1), Shard(0)))] + [None]
    plain, placed = parameters(homes)
    optimizer = make(placed, fused=True)
    planned = []
    with dtorch.explain() as report:
        for step in range(4):
            give_gradients(plain, placed, homes, step)
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            optimizer.step()
            planned.append(dtorch.session().planned)
    assert not report.events and not report.replicated
    assert planned[2] == planned[3]
