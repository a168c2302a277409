"""Several workers, in threads: the numbers of one, whatever is where."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard, init_device_mesh
from dtorch.core.errors import RemoteError
from dtorch.testing.threads import threaded_session
from dtorch.worker.meeting import Messages, TalkInParts
from tests.models.zoo import MODELS, VOCABULARY, assert_same_training, llama, without_dropout

WORKERS = [(2, None), (3, None), (5, None), (2, {"cpu": [5, 1]}), (3, {"cpu": [1, 0, 5]})]
MESHES = {"a": (3,), "a,b": (2, 3), "b,a": (3, 2)}
PLACED = [Shard(0), Shard(1), Replicate(), Partial(), Partial("max")]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]


@pytest.fixture(params=WORKERS, ids=str)
def workers(request: pytest.FixtureRequest) -> Iterator[None]:
    count, counts = request.param
    with threaded_session(count, counts):
        yield


def value(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 9
    return whole > 0 if dtype == torch.bool else whole.abs().to(dtype)


@pytest.mark.parametrize("names", MESHES)
@pytest.mark.usefixtures("workers")
def test_every_redistribution(names: str) -> None:
    mesh = init_device_mesh("cpu", MESHES[names], mesh_dim_names=tuple(names.split(",")))
    for number, (source, target) in enumerate(itertools.product(itertools.product(PLACED, repeat=mesh.ndim), repeat=2)):
        if any(isinstance(p, Partial) for p in target) or (number % 7 and mesh.ndim > 1):
            continue
        dtype = torch.float32 if Partial("max") in source and Partial() in source else DTYPES[number % len(DTYPES)]
        if dtype == torch.complex64 and Partial("max") in source:
            dtype = torch.float32
        whole = value((5, 4), dtype)
        tensor = dtorch.Tensor(whole, device_mesh=mesh).redistribute(placements=source)
        assert torch.equal(tensor.redistribute(placements=target).to_torch(), whole), (source, target, dtype)


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "prod"])
@pytest.mark.parametrize("rows", [3, 301])
@pytest.mark.usefixtures("workers")
def test_sums_small_and_large(op: str, rows: int) -> None:
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"))
    for dtype in (torch.float32, torch.float64, torch.int32):
        pieces = [value((rows, 37), dtype) % 4 + n for n in range(3)]
        stacked = torch.stack(pieces)
        whole = {
            "sum": stacked.sum(0),
            "avg": stacked.double().mean(0).floor() if dtype == torch.int32 else stacked.mean(0),
            "max": stacked.amax(0),
            "min": stacked.amin(0),
            "prod": stacked.prod(0),
        }[op]
        tensor = dtorch.from_local(lambda at, given=pieces: given[at[1]].clone(), mesh, [Replicate(), Partial(op)])
        for target in ([Replicate(), Replicate()], [Replicate(), Shard(0)], [Shard(1), Shard(0)]):
            torch.testing.assert_close(tensor.redistribute(placements=target).to_torch(), whole.to(dtype), rtol=1e-6, atol=0)


SIDES = [(9000, 100), (100, 9000), (9000, 8500)]
"""Of which sums some are large and some are small."""


@pytest.mark.parametrize("sizes", SIDES, ids=str)
@pytest.mark.usefixtures("workers")
def test_a_large_sum_beside_a_small_one(sizes: tuple[int, int]) -> None:
    whole = torch.arange(sum(sizes))
    for axes in ((0, 1), (1, 0)):
        mesh = init_device_mesh("cpu", tuple((3, 2)[a] for a in axes))
        source, target = [Partial(), Shard(0, sizes)], [Replicate(), Shard(0, sizes)]
        tensor = dtorch.Tensor(whole, device_mesh=mesh).redistribute(placements=[source[a] for a in axes])
        assert torch.equal(tensor.redistribute(placements=[target[a] for a in axes]).to_torch(), whole)


def test_a_failure_between_the_rounds_of_a_large_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    second = TalkInParts.second

    def failing(self: TalkInParts) -> Messages:
        if self.meeting.me == 1 and self.meeting.step.op == "max":
            raise MemoryError("no room")
        return second(self)

    monkeypatch.setattr(TalkInParts, "second", failing)
    mesh = init_device_mesh("cpu", (4, 2))
    with threaded_session(3):
        for sizes in SIDES:
            tensor = dtorch.Tensor(torch.ones(sum(sizes)), device_mesh=mesh)
            placed = [Replicate(), Shard(0, sizes)]
            large = tensor.redistribute(placements=[Partial("max"), placed[1]]).redistribute(placements=placed)
            with pytest.raises(RemoteError, match="no room"):
                large.to_torch()
            assert tensor.redistribute(placements=[Partial(), placed[1]]).redistribute(placements=placed).sum().item() == sum(
                sizes
            )


@pytest.mark.usefixtures("workers")
def test_between_meshes_of_different_workers() -> None:
    one, two = dtorch.DeviceMesh("cpu", [0, 3, 1]), dtorch.DeviceMesh("cpu", [[2, 4], [5, 1]])
    whole = torch.arange(35.0).reshape(7, 5)
    for source, target in itertools.product((Shard(0), Shard(1), Replicate(), Partial()), repeat=2):
        there = [target if not isinstance(target, Partial) else Shard(0), Shard(1)]
        moved = dtorch.Tensor(whole, device_mesh=one).redistribute(placements=[source]).redistribute(two, there)
        assert torch.equal(moved.to_torch(), whole) and moved.device_mesh is two


@pytest.mark.usefixtures("workers")
def test_views_writes_and_unknown_shapes() -> None:
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"))
    expected = value((9, 4), torch.float32)
    tensor = dtorch.Tensor(expected, device_mesh=mesh).redistribute(placements=[Shard(0), Shard(1)])
    tensor[2:5].mul_(-3)
    expected[2:5].mul_(-3)
    assert torch.equal(tensor.to_torch(), expected) and torch.equal(tensor.relu().nonzero().to_torch(), expected.relu().nonzero())
    assert tensor.max().item() == expected.max().item()


@pytest.mark.parametrize("name", MODELS)
def test_models_train(name: str) -> None:
    model = without_dropout(MODELS[name]())
    ids = torch.randint(1, VOCABULARY, (4, 7), generator=torch.Generator().manual_seed(1))
    with threaded_session(3, {"cpu": [3, 2, 3]}):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("fsdp", "tp", "pp"))
        assert_same_training(dtorch.parallelize(copy.deepcopy(model), mesh), model, input_ids=ids, labels=ids)


def picky_too(piece: torch.Tensor) -> torch.Tensor:
    """Fails where it finds a large number."""
    if not piece.is_meta and (piece > 8).any():
        raise ValueError("a large number")
    return piece * 3


@pytest.mark.usefixtures("workers")
def test_each_failure_is_told_where_it_is_to_blame() -> None:
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"))
    placed = [Shard(0), Shard(1)]
    numbers = torch.ones(4, 6)
    numbers[0, 0], numbers[3, 5] = -1, 9
    tensor = dtorch.Tensor(numbers, device_mesh=mesh).redistribute(placements=placed)
    made = [dtorch.local_map(f, [placed], placed)(tensor) for f in (picky, picky_too)]
    with pytest.raises(RemoteError, match="a negative number"):
        tensor.sum().item()
    assert tensor.sum().item() == 30
    for value, told in zip(made, ("a negative number", "a large number"), strict=True):
        for result in (value.sum(0), value.redistribute(placements=[Shard(1), Shard(0)]).exp().sum()):
            with pytest.raises(RemoteError, match=told):
                result.to_torch()


def test_generation() -> None:
    model = llama()
    ids = torch.randint(1, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    with threaded_session(3):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "pp"))
        generated = dtorch.parallelize(copy.deepcopy(model), mesh).generate(ids, **options).to_torch()
    assert torch.equal(generated, model.generate(ids, **options))


def picky(piece: torch.Tensor) -> torch.Tensor:
    """Fails where it finds a negative number."""
    if not piece.is_meta and (piece < 0).any():
        raise ValueError("a negative number")
    return piece * 2


@pytest.mark.usefixtures("workers")
def test_a_failure_on_one_worker_keeps_nobody_waiting() -> None:
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"))
    placed = [Shard(0), Shard(1)]
    numbers = torch.ones(4, 6)
    numbers[3, 5] = -1
    bad, good = (dtorch.Tensor(n, device_mesh=mesh).redistribute(placements=placed) for n in (numbers, numbers.abs()))
    mapped = dtorch.local_map(picky, [placed], placed)
    # Sums in rounds, gathers, cuts and exchanges, each with a member that has nothing to give.
    made = mapped(bad)
    later = [
        made.sum(),
        made.redistribute(placements=[Replicate(), Shard(1)]),
        made.redistribute(placements=[Shard(1), Shard(0)]),
    ]
    wide = made.repeat(100, 60).redistribute(placements=[Partial(), Shard(0)]).redistribute(placements=[Replicate(), Shard(0)])
    with pytest.raises(RemoteError, match="a negative number") as caught:
        later[0].item()
    assert "test_workers.py" in str(caught.value)
    for tensor in [*later, wide]:
        # Also where a worker has it from one that has it from another.
        for made in (tensor, tensor.redistribute(placements=[Replicate(), Replicate()]) + 1):
            with pytest.raises(RemoteError, match="a negative number") as again:
                made.to_torch()
            assert again.value.operator == caught.value.operator and again.value.site == caught.value.site
    assert mapped(good).sum().item() == 48
