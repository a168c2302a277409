"""Several values moved in one plan: the same pieces as one by one, in fewer collectives."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from dtorch.core.mesh import init_device_mesh
from dtorch.core.placements import Partial, Placement, Replicate, Shard
from dtorch.core.program import Call, Collective, DefinePlan, Together
from dtorch.core.spec import Spec
from dtorch.sharding.builder import Builder
from dtorch.sharding.planner import plan_into
from dtorch.sharding.redistribute import redistribute
from dtorch.sharding.together import redistribute_together, refill_together
from dtorch.worker.compile import CompiledPlan
from dtorch.worker.store import Store
from tests.worker.test_redistribute import pieces_of

LINE = init_device_mesh("cpu", (3,), mesh_dim_names=("a",))
GRID = init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"))
CUBE = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
CHOICES: list[Placement] = [Replicate(), Shard(0), Shard(1), Partial()]
SHAPES = [(7, 3), (4, 5), (2, 9)]


def together(sources: list[Spec], targets: list[Spec]) -> tuple[Builder, DefinePlan]:
    builder = Builder("test", sources, plan_into)
    return builder, builder.define(redistribute_together(builder, builder.inputs, targets))


def run(plan: DefinePlan, given: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    store = Store(dict(enumerate(given)))
    outs = [100 + i for i in range(len(plan.outputs))]
    CompiledPlan(plan, torch.device).run(store, Call(0, list(range(len(given))), outs, []))
    return [list(store[h]) for h in outs]


def alone(source: Spec, target: Spec, pieces: list[torch.Tensor]) -> tuple[list[torch.Tensor], Builder]:
    builder = Builder("test", [source], plan_into)
    out = redistribute(builder, builder.inputs[0], target)
    return run(builder.define([out]), [pieces])[0], builder


@pytest.mark.parametrize("mesh", [LINE, GRID, CUBE])
def test_the_same_pieces_as_one_by_one(mesh: object) -> None:
    rng = random.Random(1)
    every = list(itertools.product(CHOICES, repeat=mesh.ndim))  # type: ignore[attr-defined]
    for _ in range(40):
        sources = [Spec.make(mesh, rng.choice(every), s, torch.float32) for s in SHAPES]  # type: ignore[arg-type]
        targets = [s.replace([REPLACED.get(p, p) for p in rng.choice(every)]) for s in sources]
        given = [pieces_of(s, torch.arange(1.0, 1 + s.shape.numel()).view(s.shape)) for s in sources]
        builder, plan = together(sources, targets)
        singles = [alone(*parts) for parts in zip(sources, targets, given, strict=True)]
        for out, (expected, _) in zip(run(plan, given), singles, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))
        comms = [comm for _, b in singles for comm in b.comms]
        assert sum(c.nbytes for c in builder.comms) == sum(c.nbytes for c in comms)
        assert len(builder.comms) <= len(comms)


REPLACED: dict[Placement, Placement] = {Partial(): Replicate()}


def test_those_of_one_kind_are_one() -> None:
    sources = [Spec.make(GRID, [Shard(d), Replicate()], s, torch.float32) for d, s in zip((0, 1, 0), SHAPES, strict=True)]
    builder, plan = together(sources, [s.replace([Replicate()] * 2) for s in sources])
    (step,) = plan.steps
    assert isinstance(step, Together) and len(step.parts) == 3
    (comm,) = builder.comms
    assert (comm.kind, comm.axis, comm.nbytes) == ("all_gather", "a", sum(3 * s.nbytes for s in sources))
    assert comm.before == "2 x [Shard(0), Replicate()], 1 x [Shard(1), Replicate()]"


def test_each_waits_for_what_comes_before_it() -> None:
    sources = [Spec.make(GRID, [Partial(), p], (7, 4), torch.float32) for p in (Partial(), Replicate(), Partial())]
    builder, plan = together(sources, [s.replace([Replicate(), Shard(0)]) for s in sources])
    assert [(c.kind, c.axis) for c in builder.comms] == [("reduce_scatter", "b"), ("all_reduce", "a")] or len(builder.comms) <= 3
    sizes = [len(s.parts) for s in plan.steps if isinstance(s, Together)]
    assert max(sizes) == 3


def test_a_refill_writes_the_memory_of_an_earlier_gather() -> None:
    source = Spec.make(GRID, [Shard(0), Shard(1)], (7, 5), torch.float32)
    whole = source.replace([Replicate(), Shard(1)])
    builder = Builder("test", [source, source, whole, whole], plan_into)
    refill_together(builder, builder.inputs[:2], builder.inputs[2:])
    plan = builder.define([])
    (step,) = plan.steps
    assert isinstance(step, Together) and all(p.refill and isinstance(p, Collective) for p in step.parts)
    compiled = CompiledPlan(plan, torch.device)
    assert compiled.written == (2, 3)
    values = [torch.randn(7, 5) for _ in range(2)]
    held = [pieces_of(whole, torch.zeros(7, 5)) for _ in range(2)]
    views = [piece.t()[1:] for piece in held[0]]
    store = Store({0: pieces_of(source, values[0]), 1: pieces_of(source, values[1]), 2: held[0], 3: held[1]})
    store.drop([2, 3])
    assert all(t.untyped_storage().nbytes() == 0 for t in (*held[0], *held[1], *views))
    compiled.run(store, Call(0, [0, 1, 2, 3], [], []))
    for pieces, value in zip(held, values, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(pieces, pieces_of(whole, value), strict=True))
    assert all(torch.equal(v, p.t()[1:]) for v, p in zip(views, held[0], strict=True)), "views see it"
