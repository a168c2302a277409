"""Linear layers on a batch of split sequences: as plain torch, with gradients of gradients, and no position moves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import DeviceMesh, Replicate, Shard, init_device_mesh
from dtorch.core.placements import Partial, Placement
from tests.sharding.harness import check, place, run, same, values

MESHES = {"ring_cp": (2,), "dp,ulysses_cp": (2, 2), "ring_cp,ulysses_cp": (2, 2)}


def mesh_of(names: str) -> DeviceMesh:
    return init_device_mesh("cpu", MESHES[names], mesh_dim_names=tuple(names.split(",")))


def lying(mesh: DeviceMesh) -> tuple[Placement, ...]:
    return tuple(Shard(0) if name == "dp" else Shard(1) for name in mesh.axis_names())


def inputs(bias: bool = True) -> list[torch.Tensor]:
    return [values(4, 7, 5), values(3, 5, seed=1), *([values(3, seed=2)] if bias else [])]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("names", MESHES)
def test_positions_stay(names: str, bias: bool) -> None:
    mesh = mesh_of(names)
    placements = [lying(mesh), *[(Replicate(),) * mesh.ndim] * 2]
    given = [place(t, mesh, p) for t, p in zip(inputs(bias), placements, strict=False)]
    with dtorch.explain() as report:
        out = F.linear(*[t.requires_grad_() for t in given])
    assert not report.events
    assert out.placements == lying(mesh)
    same(run(F.linear, given, True), run(F.linear, inputs(bias), True), names)


def test_the_gradient_of_a_weight_is_a_partial_sum_where_that_moves_less() -> None:
    mesh = mesh_of("ring_cp")
    x, w = (place(t, mesh, p) for t, p in ((values(4, 64, 5), (Shard(1),)), (values(3, 5), (Replicate(),))))
    out = F.linear(x.requires_grad_(), w.requires_grad_())
    with dtorch.explain() as report:
        by_input, by_weight = torch.autograd.grad(out, (x, w), out.detach())
    assert (by_input.placements, by_weight.placements) == ((Shard(1),), (Partial(),))
    assert not report.events


@pytest.mark.parametrize("names", MESHES)
def test_any_placements(names: str) -> None:
    check(F.linear, *inputs(), grad=True, limit=25, meshes=[mesh_of(names)])
    check(F.linear, *inputs(False), grad=True, limit=25, meshes=[mesh_of(names)])


def test_gradients_of_gradients() -> None:
    mesh = mesh_of("ring_cp")

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        (grad,) = torch.autograd.grad((F.linear(x, w) ** 3).sum(), w, create_graph=True)
        return (grad**2).sum()

    given = [place(t, mesh, p) for t, p in zip(inputs(False), (lying(mesh), (Replicate(),)), strict=True)]
    same(run(fn, given, True), run(fn, inputs(False), True), "twice", 1e-4, 1e-4)


def test_contexts() -> None:
    mesh = mesh_of("ring_cp")
    given = [place(t, mesh, p) for t, p in zip(inputs(), (lying(mesh), *[(Replicate(),)] * 2), strict=True)]
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            same(F.linear(*given), F.linear(*inputs()), context.__name__)
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = F.linear(*given), F.linear(*inputs())
    same(out, expected, "autocast", 1e-2, 1e-2)
    assert out.dtype == torch.bfloat16


def test_mixed_with_plain_tensors_and_what_does_not_fit() -> None:
    mesh, (x, w, b) = mesh_of("ring_cp"), inputs()
    placed = place(x, mesh, lying(mesh))
    same(F.linear(placed, w, b), F.linear(x, w, b), "plain weight")
    layer = torch.nn.Linear(5, 3)
    same(F.linear(x, layer.weight, layer.bias), layer(x), "plain layer")
    with pytest.raises(RuntimeError, match="same reduction dim"):
        F.linear(placed, place(w.t(), mesh, (Replicate(),)))
