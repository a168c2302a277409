"""Plain tensors among global ones, and tensors of several meshes, in operators, modules and transforms of functions."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import dtorch
from dtorch import DeviceMesh, MeshError, Replicate, Shard, init_device_mesh
from tests.sharding.harness import check, place, same, values

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*has no sharding rule:RuntimeWarning", "ignore:.*torch.jit.script:DeprecationWarning"
)
R = Replicate()
LINE, GRID, FAR = init_device_mesh("cpu", 3), init_device_mesh("cpu", (2, 2)), DeviceMesh("cpu", [8, 9])
HOMES = [(LINE, (Shard(0),)), (LINE, (Shard(1),)), (GRID, (Shard(0), Shard(1))), (GRID, (Shard(0), Shard(0)))]


def whole(t: torch.Tensor) -> torch.Tensor:
    return t.detach().to_torch() if isinstance(t, dtorch.Tensor) else t.detach()


PROGRAMS: dict[str, Callable[[torch.Tensor], object]] = {
    "sum": lambda z: (z + torch.arange(4), torch.arange(4) + z, 2 * z, torch.tensor(2) * z),
    "rows by a list": lambda z: z[[0, 3]],
    "rows by a tensor": lambda z: z[torch.tensor([4, 0, 0])],
    "a mask": lambda z: z[torch.tensor([True, False, True, True, False])],
    "masked_fill": lambda z: z.masked_fill(torch.eye(5, 4).bool(), 7),
    "a column set": lambda z: z.clone().index_fill_(1, torch.tensor([1]), 3),
    "a column assigned": lambda z: _assigned(z, (slice(None), 0), torch.arange(5.0)),
    "rows assigned": lambda z: _assigned(z, torch.tensor([4, 1]), torch.arange(8.0).view(2, 4)),
    "a mask assigned": lambda z: _assigned(z, torch.arange(20).view(5, 4) > 9, torch.tensor(5.0)),
    "copied in": lambda z: z.clone().copy_(torch.arange(20.0).view(5, 4)),
    "copied out": lambda z: torch.zeros(5, 4).copy_(z),
    "added into a plain one": lambda z: torch.ones(5, 4).add_(z),
    "products": lambda z: (z @ torch.ones(4, 2), torch.ones(2, 5) @ z, torch.ones(5) @ z, F.linear(z, torch.ones(3, 4))),
    "joined": lambda z: (
        torch.cat([z, torch.ones(2, 4)]),
        torch.stack([torch.ones(5, 4), z]),
        torch.where(z > 0, z, torch.ones(())),
    ),
    "einsum": lambda z: torch.einsum("ij,kj->ik", z, torch.ones(3, 4)),
    "compared": lambda z: (z > torch.zeros(4), torch.maximum(z, torch.zeros(5, 1)), torch.equal(z, z * 1)),
    "scattered": lambda z: z.scatter_add(0, torch.tensor([[4, 0, 0, 1]]), torch.ones(1, 4)),
    "searched": lambda z: torch.searchsorted(torch.tensor([-1.0, 0.0, 1.0]), z),
    "tensor and number": lambda z: (
        z.add(torch.tensor(1), alpha=2),
        torch.add(torch.tensor(1.5), z),
        torch.clamp(z, torch.zeros(4), torch.ones(4)),
    ),
    "lerp": lambda z: torch.lerp(torch.zeros(5, 4), z, torch.full((5, 4), 0.25)),
}


def _assigned(z: torch.Tensor, at: object, what: torch.Tensor) -> torch.Tensor:
    z = z.clone()
    z[at] = what
    return z


@pytest.mark.parametrize("fn", PROGRAMS.values(), ids=PROGRAMS)
def test_plain_tensors_take_part(fn: Callable) -> None:
    check(fn, values(5, 4), rule=False, limit=6)


MESHLESS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "sum": lambda a, b: a + b,
    "in place": lambda a, b: a.add_(b),
    "product": lambda a, b: a @ b.t(),
    "joined": lambda a, b: torch.cat([a, b]),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "copied": lambda a, b: a.copy_(b),
    "written row": lambda a, b: a.__setitem__(0, b[0]),
    "out": lambda a, b: torch.add(a, a, out=b),
    "loss": lambda a, b: F.mse_loss(a, b),
    "comparison": lambda a, b: torch.equal(a, b),
}


@pytest.mark.parametrize("fn", MESHLESS.values(), ids=MESHLESS)
def test_two_meshes_in_one_operator_are_refused_in_four_parts(fn: Callable) -> None:
    a, b = place(values(5, 4), LINE, (Shard(0),)), place(values(5, 4, seed=1), GRID, (R, Shard(1)))
    before = whole(a), whole(b)
    with pytest.raises(MeshError) as caught:
        fn(a, b)
    text = str(caught.value)
    assert all(part in text for part in ("rule:", "where:", "to do:", repr(LINE), repr(GRID), "redistribute(device_mesh=...)"))
    assert torch.equal(whole(a), before[0]) and torch.equal(whole(b), before[1])
    same(a + b.redistribute_like(a), before[0] + before[1], "brought over")


@pytest.mark.parametrize("source", HOMES, ids=str)
@pytest.mark.parametrize("target", [*HOMES, (FAR, (Shard(1),)), (FAR, (R,))], ids=str)
def test_moving_across_meshes_and_back(source: tuple, target: tuple) -> None:
    x = place(values(5, 4), *source).requires_grad_()
    y = x.redistribute(target[0], list(target[1]))
    assert y.device_mesh is target[0] and y.placements == target[1]
    z = (y * torch.arange(4)).redistribute(source[0], list(source[1]))
    same(z, values(5, 4) * torch.arange(4), "there and back")
    z.sum().backward()
    same(x.grad, torch.arange(4.0).expand(5, 4), "gradient")
    assert x.grad.device_mesh is source[0]


class Adapted(nn.Module):
    """A frozen global weight with a plain low-rank correction beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x)) * 0.5


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("home", HOMES, ids=str)
@pytest.mark.parametrize("plain_input", [True, False])
def test_low_rank_corrections_of_global_weights(home: tuple, plain_input: bool, reentrant: bool | None) -> None:
    plain = Adapted(nn.Linear(4, 6))
    placed = copy.deepcopy(plain)
    placed.base.weight = nn.Parameter(place(plain.base.weight.data, *home), requires_grad=False)
    results = []
    for model in (plain, placed):
        x = values(5, 4)
        x = (x if model is plain or plain_input else place(x, *home)).detach().requires_grad_()
        y = model(x) if reentrant is None else checkpoint(model, x, use_reentrant=reentrant)
        y.pow(2).mean().backward()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
        optimizer.step()
        results.append(
            [whole(t) for t in (y, x.grad, *(p.grad for p in (model.down.weight, model.up.weight)), *model.parameters())]
        )
        assert type(model.down.weight) is nn.Parameter and not isinstance(model.down.weight, dtorch.Tensor)
    same(results[1], results[0], str(home), rtol=1e-4, atol=1e-5)


TRANSFORMS: dict[str, Callable] = {
    "functional_call": lambda x, w: torch.func.functional_call(_Affine(), {"weight": w}, (x,)),
    "grad": lambda x, w: torch.func.grad(lambda v: (x @ v).tanh().sum())(w),
    "grad and value": lambda x, w: torch.func.grad_and_value(lambda v: (x @ v).pow(2).mean())(w),
    "vjp": lambda x, w: torch.func.vjp(lambda v: x @ v, w)[1](torch.ones(5, 3)),
    "grad of a functional call": lambda x, w: torch.func.grad(
        lambda p: torch.func.functional_call(_Affine(), p, (x,)).pow(2).sum()
    )({"weight": w}),
    "second": lambda x, w: torch.func.grad(lambda v: torch.func.grad(lambda u: (x @ u).pow(3).sum())(v).sum())(w),
}


class _Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + 1


@pytest.mark.parametrize("fn", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_of_functions(fn: Callable) -> None:
    for mesh, placements in HOMES:
        x, w = values(5, 4), values(4, 3, seed=1)
        got = fn(place(x, mesh, placements), place(w, mesh, placements[::-1]))
        same(got, fn(x, w), str(placements))


MAPPED: dict[str, Callable] = {
    "vmap": lambda x: torch.vmap(lambda row: row.cumsum(0) * 2)(x),
    "vmap of products": lambda x: torch.vmap(lambda row: row @ x.t())(x),
    "vmap of grad": lambda x: torch.vmap(torch.func.grad(lambda row: row.pow(3).sum()))(x),
    "vmap over columns": lambda x: torch.vmap(lambda c: c / c.abs().sum(), in_dims=1, out_dims=1)(x),
    "jacrev": lambda x: torch.func.jacrev(lambda v: v.pow(2).sum(0))(x),
    "jvp": lambda x: torch.func.jvp(lambda v: v.pow(2), (x,), (torch.ones_like(x),)),
    "hessian": lambda x: torch.func.jacrev(torch.func.jacrev(lambda v: v.pow(3).sum()))(x[0]),
}


@pytest.mark.parametrize("fn", MAPPED.values(), ids=MAPPED)
def test_vectorised_functions(fn: Callable) -> None:
    for mesh, placements in HOMES:
        x = values(5, 4)
        same(fn(place(x, mesh, placements)), fn(x), str(placements))


def test_forward_over_reverse_is_refused_in_four_parts() -> None:
    """PyTorch asks for gradients without data there, which no device of a mesh can hold."""
    with pytest.raises(MeshError, match=r"(?s)meta.*rule:.*where:.*to do:"):
        torch.func.hessian(lambda v: v.pow(3).sum())(place(values(4), LINE, (Shard(0),)))
