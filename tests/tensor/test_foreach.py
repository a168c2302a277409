"""Lists of tensors: ``_foreach`` operators, optimizers and gradient clipping, also over several meshes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import dtorch
from dtorch import DeviceMesh, Partial, Replicate, Shard, init_device_mesh
from tests.sharding.harness import place, values

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule:RuntimeWarning")
R = Replicate()
HERE, THERE = init_device_mesh("cpu", (2, 2)), DeviceMesh("cpu", [4, 5, 6])

LISTS = {
    "add": lambda a, b: torch._foreach_add(a, b),
    "add scalar": lambda a, b: torch._foreach_add(a, 2.0),
    "add scalars": lambda a, b: torch._foreach_add(a, [1.0, 2.0, 3.0]),
    "add alpha": lambda a, b: torch._foreach_add(a, b, alpha=3),
    "add tensor": lambda a, b: torch._foreach_add(a, torch.tensor(2.0)),
    "sub": lambda a, b: torch._foreach_sub(a, b),
    "mul": lambda a, b: torch._foreach_mul(a, b),
    "mul tensor": lambda a, b: torch._foreach_mul(a, torch.tensor(0.5)),
    "div": lambda a, b: torch._foreach_div(a, [2.0, 4.0, 8.0]),
    "neg": lambda a, b: torch._foreach_neg(a),
    "sqrt": lambda a, b: torch._foreach_sqrt(torch._foreach_abs(a)),
    "pow": lambda a, b: torch._foreach_pow(a, 2),
    "lerp": lambda a, b: torch._foreach_lerp(a, b, 0.25),
    "lerp list": lambda a, b: torch._foreach_lerp(a, b, [x.abs() for x in a]),
    "addcmul": lambda a, b: torch._foreach_addcmul(a, a, b, 0.5),
    "addcmul scalars": lambda a, b: torch._foreach_addcmul(a, a, b, [1.0, 2.0, 3.0]),
    "addcmul scalars in a tensor": lambda a, b: torch._foreach_addcmul(a, a, b, torch.tensor([1.0, 2.0, 3.0])),
    "pow of a scalar": lambda a, b: torch._foreach_pow(2.0, a),
    "pow list": lambda a, b: torch._foreach_pow(torch._foreach_abs(a), [1.0, 2.0, 3.0]),
    "minimum scalars": lambda a, b: torch._foreach_minimum(a, [0.5, 0.0, -0.5]),
    "addcdiv": lambda a, b: torch._foreach_addcdiv(a, b, [x.abs() + 1 for x in a], value=0.5),
    "maximum": lambda a, b: torch._foreach_maximum(a, b),
    "clamp": lambda a, b: torch._foreach_clamp_min(a, 0.0),
    "norm": lambda a, b: torch._foreach_norm(a),
    "norm 1": lambda a, b: torch._foreach_norm(a, 1),
    "norm inf": lambda a, b: torch._foreach_norm(a, float("inf")),
    "max": lambda a, b: torch._foreach_max(a),
    "sign": lambda a, b: torch._foreach_sign(a),
    "reciprocal": lambda a, b: torch._foreach_reciprocal([x.abs() + 1 for x in a]),
}

WRITES = {
    "add_": lambda a, b: torch._foreach_add_(a, b, alpha=-1),
    "mul_": lambda a, b: torch._foreach_mul_(a, 0.5),
    "mul_ tensor": lambda a, b: torch._foreach_mul_(a, torch.tensor(0.5)),
    "zero_": lambda a, b: torch._foreach_zero_(a),
    "copy_": lambda a, b: torch._foreach_copy_(a, b),
    "sqrt_": lambda a, b: (torch._foreach_abs_(a), torch._foreach_sqrt_(a)),
    "addcdiv_": lambda a, b: torch._foreach_addcdiv_(a, b, [x.abs() + 1 for x in b], [1.0, 2.0, 3.0]),
    "addcmul_": lambda a, b: torch._foreach_addcmul_(a, b, b, value=0.5),
    "maximum_": lambda a, b: torch._foreach_maximum_(a, b),
    "minimum_ scalar": lambda a, b: torch._foreach_minimum_(a, 0.25),
    "pow_": lambda a, b: torch._foreach_pow_(a, 2),
    "clamp_min_": lambda a, b: torch._foreach_clamp_min_(a, b),
    "lerp_": lambda a, b: torch._foreach_lerp_(a, b, 0.25),
    "div_": lambda a, b: torch._foreach_div_(a, [2.0, 4.0, 8.0]),
}


def plain_lists() -> tuple[list, list]:
    shapes = ((5, 4), (3,), (2, 2))
    return [values(*s, seed=i) for i, s in enumerate(shapes)], [values(*s, seed=9 + i) for i, s in enumerate(shapes)]


def placed_lists() -> tuple[list, list]:
    """Elements on two meshes, with different placements."""
    homes = [(HERE, (Shard(0), R)), (THERE, (Shard(0),)), (HERE, (Partial(), Shard(1)))]
    return tuple([place(t, mesh, p) for t, (mesh, p) in zip(ts, homes, strict=True)] for ts in plain_lists())


@pytest.mark.parametrize("fn", LISTS.values(), ids=LISTS)
def test_lists_over_two_meshes(fn: object) -> None:
    made = fn(*placed_lists())
    expected = fn(*plain_lists())
    assert len(made) == len(expected)
    for t, e, mesh in zip(made, expected, (HERE, THERE, HERE), strict=True):
        assert t.device_mesh is mesh and t.dtype == e.dtype
        torch.testing.assert_close(t.to_torch(), e)


@pytest.mark.parametrize("fn", WRITES.values(), ids=WRITES)
def test_writes_over_two_meshes(fn: object) -> None:
    (a, b), (plain, other) = placed_lists(), plain_lists()
    before = [t._spec for t in a]
    fn(a, b)
    fn(plain, other)
    for t, e, spec in zip(a, plain, before, strict=True):
        assert t._spec is spec
        torch.testing.assert_close(t.to_torch(), e)


def two_stages() -> tuple[nn.Sequential, nn.Sequential]:
    """The same two-layer model, plain and with its layers on two meshes."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    placed = copy.deepcopy(plain)
    homes = {
        "0.weight": (HERE, [Shard(0), R]),
        "0.bias": (HERE, [Shard(0), R]),
        "1.weight": (HERE, [R, R]),
        "1.bias": (HERE, [R, R]),
        "2.weight": (THERE, [Shard(1)]),
        "2.bias": (THERE, [R]),
    }
    for name, p in list(placed.named_parameters()):
        owner, _, last = name.rpartition(".")
        mesh, placements = homes[name]
        setattr(placed.get_submodule(owner), last, nn.Parameter(dtorch.Tensor(p.data, device_mesh=mesh, placements=placements)))
    return plain, placed


def forward(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    h = model[1](model[0](x)).tanh()
    return model[2](h.redistribute(THERE) if isinstance(h, dtorch.Tensor) else h).pow(2).mean()


def both_backward(plain: nn.Sequential, placed: nn.Sequential) -> None:
    x = values(5, 4)
    forward(plain, x).backward()
    forward(placed, place(x, HERE, (Shard(0), R))).backward()


def assert_same(plain: nn.Module, placed: nn.Module, of: str = "data") -> None:
    for (name, p), q in zip(plain.named_parameters(), placed.parameters(), strict=True):
        torch.testing.assert_close(getattr(q, of).to_torch(), getattr(p, of), msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clip_grad_norm_over_two_meshes(norm_type: float, foreach: bool | None) -> None:
    plain, placed = two_stages()
    both_backward(plain, placed)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type, foreach=foreach)
    total = nn.utils.clip_grad_norm_(placed.parameters(), 0.1, norm_type, foreach=foreach)
    torch.testing.assert_close(total.to_torch(), expected)
    assert_same(plain, placed, "grad")


def test_clip_grad_value_and_vectors() -> None:
    plain, placed = two_stages()
    both_backward(plain, placed)
    for model in (plain, placed):
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
    assert_same(plain, placed, "grad")


def test_error_if_nonfinite_waits_and_raises() -> None:
    p = nn.Parameter(place(values(4), init_device_mesh("cpu", 2), (Shard(0),)))
    p.grad = dtorch.full((4,), float("inf"), device_mesh=p.device_mesh)
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_([p], 1.0, error_if_nonfinite=True)


OPTIMIZERS = {
    "sgd": lambda ps, **k: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True, **k),
    "adam": lambda ps, **k: torch.optim.Adam(ps, lr=0.1, amsgrad=True, **k),
    "adamw": lambda ps, **k: torch.optim.AdamW(ps, lr=0.1, **k),
    "rmsprop": lambda ps, **k: torch.optim.RMSprop(ps, lr=0.1, centered=True, **k),
    "adagrad": lambda ps, **k: torch.optim.Adagrad(ps, lr=0.1, **k),
    "adamw with maximize": lambda ps, **k: torch.optim.AdamW(ps, lr=0.1, maximize=True, **k),
}


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers(make: object, foreach: bool) -> None:
    plain, placed = two_stages()
    optimizers = [make(m.parameters(), foreach=foreach) for m in (plain, placed)]
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 5) for o in optimizers]
    for _ in range(3):
        for o in optimizers:
            o.zero_grad()
        both_backward(plain, placed)
        for o, s in zip(optimizers, schedulers, strict=True):
            o.step()
            s.step()
    assert_same(plain, placed)
    state = optimizers[1].state[placed[0].weight]
    for value in state.values():
        if isinstance(value, dtorch.Tensor) and value.ndim:
            assert value.device_mesh is HERE and value.placements == (Shard(0), R)


def test_moment_tensors_keep_their_parameters_placement_with_closure() -> None:
    plain, placed = two_stages()
    for model, x in ((plain, values(5, 4)), (placed, place(values(5, 4), HERE, (Shard(0), R)))):
        optimizer = torch.optim.LBFGS(list(model[0].parameters()), max_iter=3)

        def closure(model=model, x=x, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model[0](x).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    torch.testing.assert_close(placed[0].weight.detach().to_torch(), plain[0].weight.detach(), rtol=1e-4, atol=1e-5)


def test_gradients_of_tied_parameters_count_each_use() -> None:
    table = nn.Parameter(place(values(6, 4), HERE, (Shard(0), R)))
    plain = nn.Parameter(values(6, 4))
    for p in (plain, table):
        hidden = torch.nn.functional.embedding(torch.tensor([1, 5]), p)
        (hidden @ p.t()).pow(2).sum().backward()
    torch.testing.assert_close(table.grad.to_torch(), plain.grad)
