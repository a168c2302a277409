"""The plan cache: equal calls plan once, changing numbers plan nothing, and what differs is told apart."""

from __future__ import annotations

import gc
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import MeshError, Replicate, Shard, UsageError, init_device_mesh
from dtorch.tensor import client as clients
from dtorch.tensor.client import Client
from dtorch.tensor.dispatch import operator_of
from dtorch.testing.sessions import own_session
from tests.sharding.harness import place, values

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule:RuntimeWarning")
R = Replicate()
MESH = init_device_mesh("cpu", 2)


@pytest.fixture
def client() -> Iterator[Client]:
    with own_session() as (client, worker):
        client.worker = worker
        yield client


def planned(client: Client, run: Callable[[], object]) -> int:
    before = client.planned
    run()
    return client.planned - before


def test_a_repeated_call_plans_nothing(client: Client) -> None:
    def step() -> torch.Tensor:
        x = dtorch.ones(6, 4, device_mesh=MESH, placements=[Shard(0)])
        y = (x @ x.t()).softmax(1)[2:].redistribute(placements=[R]) + torch.ones(6)
        return (y * 2).sum().item()

    assert planned(client, step) > 0
    assert planned(client, step) == 0
    assert planned(client, lambda: [step() for _ in range(5)]) == 0


def test_equal_specs_of_other_tensors_plan_nothing(client: Client) -> None:
    a, b = (place(values(6, 4, seed=s), MESH, (Shard(0),)) for s in (0, 1))
    a.exp()
    assert planned(client, b.exp) == 0
    assert planned(client, lambda: place(values(6, 4), MESH, (Shard(0, (4, 2)),)).exp()) == 1
    assert planned(client, lambda: b.double().exp()) >= 1
    assert planned(client, lambda: b.t().contiguous()) >= 1


SCALARS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "mul": lambda x, s: x * s,
    "add": lambda x, s: x + s,
    "add with alpha": lambda x, s: torch.add(x, x, alpha=s),
    "div": lambda x, s: x / s,
    "rsub": lambda x, s: s - x,
    "pow": lambda x, s: x**s,
    "compare": lambda x, s: x > s,
    "clamp": lambda x, s: x.clamp(-s, s),
    "fill": lambda x, s: x.fill_(s),
    "mul in place": lambda x, s: x.mul_(s),
    "lerp": lambda x, s: x.lerp(x + 1, s),
    "addcmul": lambda x, s: torch.addcmul(x, x, x, value=s),
    "where": lambda x, s: torch.where(x > 0, x, s),
    "masked_fill": lambda x, s: x.masked_fill(x > 0, s),
    "leaky relu": lambda x, s: F.leaky_relu(x, s),
    "partial times scalar": lambda x, s: x.sum(0) * s,
}


@pytest.mark.parametrize("program", SCALARS.values(), ids=SCALARS)
def test_a_changing_number_plans_nothing_and_is_heeded(program: Callable, client: Client) -> None:
    x = place(values(6, 4).abs() + 1, MESH, (Shard(0),))
    program(x.clone(), 0.5)
    results = []
    assert planned(client, lambda: results.extend(program(x.clone(), 0.25 * i) for i in range(1, 9))) == 0
    for i, result in enumerate(results, 1):
        torch.testing.assert_close(result.to_torch(), program(values(6, 4).abs() + 1, 0.25 * i))


def test_int_and_float_scalars_are_told_apart(client: Client) -> None:
    x = dtorch.arange(4, device_mesh=MESH, placements=[Shard(0)])
    assert ((x * 2).dtype, (x * 2.0).dtype, (x * True).dtype, (x * 3).tolist()) == (
        torch.int64,
        torch.float32,
        torch.int64,
        [0, 3, 6, 9],
    )
    y = dtorch.ones(4, device_mesh=MESH)
    assert (y + 1).dtype == torch.float32 and (y * 1j).dtype == torch.complex64 and (y == 1).all() and (y == True).all()  # noqa: E712


STATIC: dict[str, Callable[[torch.Tensor], tuple]] = {
    "dims": lambda x: (x.sum(0), x.sum(1), x.sum(), x.sum((0, 1)), x.sum(0, keepdim=True)),
    "topk": lambda x: (x.topk(1).values, x.topk(3).values, x.topk(3, largest=False).values, x.topk(2, dim=0).indices),
    "slices": lambda x: (x[0:2], x[1:3], x[:, 1:], x[::2], x[-1], x[0]),
    "flags": lambda x: (x.sort(descending=True).values, x.sort(descending=False).values, x.cumsum(0), x.cumsum(1)),
    "dtypes": lambda x: (x.to(torch.float64), x.to(torch.int32), x.to(torch.bfloat16), x.sum(dtype=torch.float64)),
    "sizes": lambda x: (x.view(4, 6), x.view(2, 12), x.expand(2, 6, 4), x.expand(3, 6, 4), x.repeat(1, 2), x.repeat(2, 1)),
    "strings": lambda x: (torch.div(x, 2, rounding_mode="floor"), torch.div(x, 2, rounding_mode="trunc"), torch.div(x, 2)),
    "true and one": lambda x: (x.var(0, correction=0), x.var(0, correction=1), x.var(0, unbiased=True), x.std(1)),
    "reductions": lambda x: (F.mse_loss(x, x * 2, reduction="sum"), F.mse_loss(x, x * 2), F.mse_loss(x, x * 2, reduction="none")),
    "none and zero": lambda x: (x.amax(), x.amax(0), x.amax(1), x.clamp(min=0.0), x.clamp(max=0.0)),
    "diagonals": lambda x: (x.tril(), x.tril(1), x.tril(-1), x.triu(), x.diagonal(), x.diagonal(1)),
    "quantities as floats": lambda x: (
        x.norm(1, 1),
        x.norm(2, 1),
        x.norm(float("inf"), 1),
        F.layer_norm(x, (4,), eps=1.0),
        F.layer_norm(x, (4,), eps=1e-5),
    ),
    "negative zero": lambda x: (
        1 / (x * 0.0).abs(),
        1 / -(x * 0.0).abs(),
        torch.full_like(x, 0.0),
        torch.full_like(x, -0.0).signbit(),
    ),
    "nan": lambda x: (
        torch.nan_to_num(x * float("nan")),
        torch.nan_to_num(x * float("nan"), nan=2.0),
        torch.nan_to_num(x * float("nan"), nan=3.0),
    ),
}


@pytest.mark.parametrize("program", STATIC.values(), ids=STATIC)
def test_static_arguments_are_told_apart(program: Callable) -> None:
    for _ in range(2):
        for t, e in zip(program(place(values(6, 4), MESH, (Shard(0),))), program(values(6, 4)), strict=True):
            torch.testing.assert_close(t.to_torch(), e)


def test_ten_thousand_steps_with_a_changing_scalar_make_one_plan_and_stay_flat(client: Client) -> None:
    x = place(values(8, 8), MESH, (Shard(0),))

    def steps(count: int) -> None:
        for i in range(count):
            out = x.mul(1.0 + i * 1e-6)
        torch.testing.assert_close(out.to_torch(), values(8, 8) * (1.0 + (count - 1) * 1e-6))
        gc.collect()

    steps(5_000)
    tracemalloc.start()
    try:
        steps(5_000)
        before = tracemalloc.get_traced_memory()[0]
        steps(10_000)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    # What a batch holds comes and goes; a value kept for each step would take a hundred times as much.
    assert grown < 50_000
    # One for the product, one for reading it.
    assert client.planned == len(client.worker._plans) == 2


def test_schedules_of_an_optimizer_plan_nothing_after_the_first_steps(client: Client) -> None:
    p = torch.nn.Parameter(place(values(6, 4), MESH, (Shard(0),)))
    plain = torch.nn.Parameter(values(6, 4))
    counts = []
    for parameter in (p, plain):
        optimizer = torch.optim.AdamW([parameter], lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (i + 1))
        for _ in range(6):
            counts.append(planned(client, lambda o=optimizer, q=parameter: (o.zero_grad(), q.pow(2).sum().backward(), o.step())))
            scheduler.step()
    assert counts[2:] == [0] * 10
    torch.testing.assert_close(p.detach().to_torch(), plain.detach())


def test_plans_that_differ_in_global_shapes_only_are_one_to_the_workers(client: Client) -> None:
    for length in (3, 4, 9):
        x = dtorch.ones(length, 4, device_mesh=MESH, placements=[Shard(0)])
        y = torch.cat([x, x + 1], 1)
        assert torch.equal(y.to_torch(), torch.cat([torch.ones(length, 4), torch.full((length, 4), 2.0)], 1))
    cats = [n for n, (text, _) in client.defined.items() if b"aten::cat" in text]
    assert len(cats) == 1 and client.defined[cats[0]][1] == 3


def test_the_cache_is_bounded(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "CACHE_LIMIT", 64)
    x = dtorch.ones(400, device_mesh=MESH, placements=[Shard(0)])
    for i in range(1, 200):
        y = x[:i] * 2
        client.flush()
        assert len(client.cache) <= 64
    # Workers forget one eviction later.
    assert len(client.worker._plans) <= 64 + 16
    assert y.sum().item() == 398 and (x[:1] * 2).tolist() == [2.0]


def test_moves_and_factories_are_bounded_too(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "CACHE_LIMIT", 64)
    for i in range(1, 200):
        x = dtorch.ones(i, device_mesh=MESH, placements=[Shard(0)]).redistribute(placements=[R])
    assert x.sum().item() == 199 and len(client.cache) <= 64 and len(client.worker._plans) <= 64 + 16 + 6


def test_a_plan_is_forgotten_by_workers_after_who_found_it_called_it(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "CACHE_LIMIT", 8)
    base = dtorch.arange(12.0, device_mesh=MESH, placements=[Shard(0)])
    view = base[1:8]
    for i in range(1, 40):
        # Reading the linked view takes it anew, by plans made after that of the read was found.
        base[:i].add_(i)
        view.redistribute(placements=[R]).to_torch()
    plain = torch.arange(12.0)
    for i in range(1, 40):
        plain[:i].add_(i)
    assert torch.equal(view.to_torch(), plain[1:8])


def test_threads_that_evict_plans_together_lose_none(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "CACHE_LIMIT", 128)
    interval, wrong = sys.getswitchinterval(), []
    sys.setswitchinterval(1e-5)

    def work(start: int) -> None:
        try:
            for n in range(start, start + 40):
                x = dtorch.ones(n, device_mesh=MESH, placements=[Shard(0)])
                if torch.cat([x, x.flip(0) * n])[1:].sum().item() != n - 1 + n * n:
                    wrong.append(n)
        except BaseException as error:  # raised in a thread, where nobody would hear of it
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(2 + i,)) for i in range(3)]
    try:
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


def test_plans_made_twice_at_once_are_forgotten_twice(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    x = dtorch.ones(4, device_mesh=MESH)
    x + 1
    key, entry = list(client.cache.items())[-1]
    client.remember(
        key, type(entry)(dtorch.Tensor, entry.plan, client.define(entry.plan), operator_of(torch.ops.aten.add.Tensor))
    )
    assert client.defined[entry.number][1] == 2 and client.evicted == [entry.number]


def test_a_mesh_that_is_refused_is_refused_again(client: Client) -> None:
    x = dtorch.ones(4, device_mesh=MESH)

    def refuse(mesh: Any) -> None:
        if len(mesh.ids) > 5:
            raise MeshError("no such devices")

    client.check_mesh = refuse
    for _ in range(3):
        with pytest.raises(MeshError):
            x.redistribute(init_device_mesh("cpu", 7), [Shard(0)])
    assert (x + 1).tolist() == [2.0] * 4


def test_issuing_does_not_grow_with_the_mesh(client: Client) -> None:
    sizes = []
    for n in (1, 64, 512):
        x = dtorch.ones(1024, 8, device_mesh=init_device_mesh("cpu", n), placements=[Shard(0)])
        x + x
        client.flush()
        x + x
        sizes.append(len(client.take()[0][-1].words))
    assert len(set(sizes)) == 1


@pytest.mark.parametrize("threshold", [7, 30])
def test_finalisers_that_issue_operators_do_not_overtake_the_batch_under_way(client: Client, threshold: int) -> None:
    x, plain, state = dtorch.zeros(4, device_mesh=MESH, placements=[Shard(0)]), torch.zeros(4), [0, ""]
    y = x + 0

    def collected(phase: str, info: Any) -> None:
        nonlocal y
        y = y + 1
        state[0] += 1
        if state[0] % 5 == 0:
            client.flush()
        if state[0] % 31 == 0:
            try:
                x.to_torch()
            except UsageError as error:
                state[1] = str(error)

    before = gc.get_threshold()
    gc.callbacks.append(collected)
    gc.set_threshold(threshold, 1, 1)
    try:
        for i in range(200):
            x.mul_(2).remainder_(11).add_(i)
            plain.mul_(2).remainder_(11).add_(i)
            if i % 40 == 0:
                client.flush()
    finally:
        gc.callbacks.remove(collected)
        gc.set_threshold(*before)
    assert torch.equal(x.to_torch(), plain) and y.tolist() == [float(state[0])] * 4
    assert not state[1] or "handed over" in state[1]


def test_a_value_cannot_be_read_in_the_middle_of_a_batch(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    x = dtorch.ones(4, device_mesh=MESH)
    submit = client.sink.submit

    def inside(first: int, batch: list) -> None:
        later.append(x + 1)
        client.flush()
        with pytest.raises(UsageError, match="handed over"):
            x.to_torch()
        submit(first, batch)

    later: list = []
    with monkeypatch.context() as patch:
        patch.setattr(client.sink, "submit", inside)
        x.mul_(3)
        client.flush()
    assert later[0].tolist() == [4.0] * 4
