"""Every redistribution, as planned, run by the worker and compared piece by piece with plain torch."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from dtorch.core.mesh import DeviceMesh, coordinates, init_device_mesh
from dtorch.core.placements import Partial, Placement, Replicate, Shard
from dtorch.core.program import Call
from dtorch.core.spec import Spec
from dtorch.sharding.builder import Builder
from dtorch.sharding.planner import plan_into
from dtorch.sharding.redistribute import redistribute
from dtorch.worker.compile import CompiledPlan
from dtorch.worker.store import Store

SHAPE = (7, 3)
PLACEMENTS: list[Placement] = [Replicate(), Shard(0), Shard(1), Partial("sum"), Partial("max")]


def pieces_of(spec: Spec, whole: torch.Tensor) -> list[torch.Tensor]:
    """The pieces of a value; each part of a partial is different, and reduces to the value exactly."""
    out = []
    for coord, (offset, size) in zip(coordinates(spec.piece_grid), spec.boxes, strict=True):
        piece = whole[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))].clone()
        for axis, at in zip(spec.axes, coord, strict=True):
            placement = spec.placements[axis]
            if isinstance(placement, Partial) and at:
                piece = piece * 0 if placement.reduce_op == "sum" else piece - at
        out.append(piece)
    return out


def reduced(spec: Spec, pieces: list[torch.Tensor]) -> torch.Tensor:
    """The value that pieces stand for."""
    whole = torch.full(spec.shape, float("nan"), dtype=spec.dtype)
    for coord in coordinates(spec.mesh.shape):
        box = spec.local_box(coord)
        place = tuple(slice(o, o + n) for o, n in zip(*box, strict=True))
        line = [coord]
        for axis in spec.partial_axes:
            line = [(*c[:axis], i, *c[axis + 1 :]) for c in line for i in range(spec.mesh.shape[axis])]
        stack = torch.stack([pieces[spec.piece_of(c)] for c in dict.fromkeys(line)])
        ops = {spec.placements[a].reduce_op for a in spec.partial_axes}
        whole[place] = stack.amax(0) if ops == {"max"} else stack.sum(0)
    return whole


def check(source: Spec, target: Spec) -> None:
    whole = torch.arange(1.0, 1 + source.shape.numel()).reshape(source.shape)
    builder = Builder("test", [source], plan_into)
    out = redistribute(builder, builder.inputs[0], target)
    plan = builder.define([out])
    store = Store({0: pieces_of(source, whole)})
    before = [p.clone() for p in store[0]]
    CompiledPlan(plan, torch.device).run(store, Call(0, [0], [1], []))
    result = list(store[1])
    assert out.spec is target
    assert [tuple(p.shape) for p in result] == [size for _, size in target.boxes]
    assert torch.equal(reduced(target, result), whole)
    assert all(torch.equal(a, b) for a, b in zip(before, store[0], strict=True)), "the source was written to"


def mixed_partials(placements: tuple[Placement, ...]) -> bool:
    return len({p.reduce_op for p in placements if isinstance(p, Partial)}) > 1


@pytest.mark.parametrize(("source", "target"), list(itertools.product(PLACEMENTS, repeat=2)))
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_one_axis(devices: int, source: Placement, target: Placement) -> None:
    mesh = init_device_mesh("cpu", devices)
    check(Spec.make(mesh, [source], SHAPE, torch.float32), Spec.make(mesh, [target], SHAPE, torch.float32))


@pytest.mark.parametrize("source", [p for p in itertools.product(PLACEMENTS, repeat=2) if not mixed_partials(p)])
def test_two_axes(source: tuple[Placement, ...]) -> None:
    mesh = init_device_mesh("cpu", (2, 3))
    for target in itertools.product(PLACEMENTS, repeat=2):
        if not mixed_partials(target):
            check(Spec.make(mesh, source, SHAPE, torch.float32), Spec.make(mesh, target, SHAPE, torch.float32))


def explicit(mesh: DeviceMesh, generator: random.Random) -> Spec:
    """Dim 0 split over both axes at random places."""
    outer = generator.randint(0, SHAPE[0])
    inner: list[int] = []
    for length in (outer, SHAPE[0] - outer):
        a, b = sorted(generator.randint(0, length) for _ in range(2))
        inner += [a, b - a, length - b]
    return Spec.make(mesh, [Shard(0, (outer, SHAPE[0] - outer)), Shard(0, tuple(inner))], SHAPE, torch.float32)


def test_explicit_sizes_on_a_dim_that_two_axes_split() -> None:
    mesh, generator = init_device_mesh("cpu", (2, 3)), random.Random(0)
    for _ in range(20):
        source = explicit(mesh, generator)
        check(source, explicit(mesh, generator))
        for placements in ([Replicate(), Replicate()], [source.placements[0], Replicate()], [Partial(), Shard(1)]):
            other = Spec.make(mesh, placements, SHAPE, torch.float32)
            check(source, other)
            check(other, source)


@pytest.mark.parametrize(("source", "target"), list(itertools.product(PLACEMENTS, repeat=2)))
def test_across_meshes(source: Placement, target: Placement) -> None:
    here, there = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [[1], [2], [5]])
    check(Spec.make(here, [source], SHAPE, torch.float32), Spec.make(there, [target, Replicate()], SHAPE, torch.float32))
