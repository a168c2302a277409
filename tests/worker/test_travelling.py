"""What travels gives the numbers of one worker: reduce ops, dtypes, uneven splits, lines of unlike length, and together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard, init_device_mesh
from dtorch.tensor.together import gradients_together
from dtorch.testing.threads import MemoryPeers, threaded_session

WORKERS = [(2, None), (3, {"cpu": [3, 2, 3]}), (8, None)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]
REAL = [dtype for dtype in DTYPES if not dtype.is_complex]
ROWS = [1, 7, 301]
"""Below and above where a sum goes in parts; with fewer rows than devices some pieces are empty."""

# Complex numbers have no order.
OPS = {"sum": DTYPES, "avg": DTYPES, "prod": DTYPES, "max": REAL, "min": REAL}
REDUCTIONS = [(op, dtype) for op, dtypes in OPS.items() for dtype in dtypes]

MESH = (2, 4)


@pytest.fixture(params=WORKERS, ids=str)
def workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("dtorch.worker.compile.LATER_NBYTES", 1 << 10)
    count, counts = request.param
    with threaded_session(count, counts):
        yield


def pieces_of(shape: tuple[int, ...], dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    """Whole numbers, whose sums and products do not depend on the order."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 4, shape, generator=generator).to(dtype) for _ in range(count)]


@pytest.mark.parametrize(("op", "dtype"), REDUCTIONS, ids=str)
@pytest.mark.usefixtures("workers")
def test_sums_of_every_dtype(op: str, dtype: torch.dtype) -> None:
    mesh = init_device_mesh("cpu", MESH, mesh_dim_names=("a", "b"))
    for rows in ROWS:
        pieces = pieces_of((rows, 37), dtype, 4)
        placed = [Shard(0), Partial(op)]
        starts = [0, -(-rows // 2), rows]
        given = dtorch.from_local(
            lambda at, pieces=pieces, starts=starts: pieces[at[1]][starts[at[0]] : starts[at[0] + 1]].clone(), mesh, placed
        )
        expected = None
        for target in ([Shard(0), Replicate()], [Replicate(), Shard(0)], [Shard(1), Shard(0)], [Shard(0), Shard(1)]):
            moved = given.redistribute(placements=target).to_torch()
            expected = reduced(op, pieces) if expected is None else expected
            assert torch.equal(moved, expected), (rows, target)


def reduced(op: str, pieces: list[torch.Tensor]) -> torch.Tensor:
    """The oracle: first to last, on plain PyTorch."""
    combine = {"sum": torch.add, "avg": torch.add, "max": torch.maximum, "min": torch.minimum, "prod": torch.mul}[op]
    if op == "avg" and not (pieces[0].is_floating_point() or pieces[0].is_complex() or pieces[0].dtype == torch.bool):
        return (sum(p.long() for p in pieces) // len(pieces)).to(pieces[0].dtype)  # type: ignore[union-attr]
    total = pieces[0]
    for piece in pieces[1:]:
        total = combine(total, piece)
    return total / len(pieces) if op == "avg" and total.dtype != torch.bool else total


@pytest.mark.parametrize("counts", [None, {"cpu": [2, 1, 1, 2]}], ids=str)
def test_lines_of_which_only_some_go_in_parts(counts: dict[str, list[int]] | None) -> None:
    # Pieces of 48 and of 4 KiB: the line of the first has a second round, that of the other has not.
    sizes = (1200, 100)
    with threaded_session(4, counts):
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"))
        given = dtorch.from_local(
            lambda at: torch.full((sizes[at[0]], 10), float(at[1] + 1)), mesh, [Shard(0, sizes=sizes), Partial()]
        )
        for _ in range(3):
            moved = given.redistribute(placements=[Shard(0, sizes=sizes), Replicate()])
            assert torch.equal(moved.to_torch(), torch.full((1300, 10), 6.0))


@pytest.mark.usefixtures("workers")
def test_all_copies_have_the_same_bits() -> None:
    mesh = init_device_mesh("cpu", 8)
    generator = torch.Generator().manual_seed(3)
    pieces = [torch.randn(999, 17, generator=generator) for _ in range(8)]
    total = dtorch.from_local(pieces, mesh, [Partial()]).redistribute(placements=[Replicate()])
    copies = dtorch.local_map(lambda t: t[None].clone(), [[Replicate()]], [Shard(0)])(total).to_torch()
    assert copies.shape[0] == 8 and all(torch.equal(copies[0], c) for c in copies)
    torch.testing.assert_close(copies[0], torch.stack(pieces).sum(0))


def test_what_is_together_travels_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    exchange = MemoryPeers.exchange

    def counted(self: MemoryPeers, *args: object) -> set[int]:
        seen.append(1)
        return exchange(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(MemoryPeers, "exchange", counted)
    with threaded_session(2):
        mesh = init_device_mesh("cpu", 4, mesh_dim_names=("fsdp",))
        wholes = [torch.arange(float(n * 3)).reshape(n, 3) for n in (1, 9, 40, 3001)]
        grads = [dtorch.from_local([w.clone() for _ in range(4)], mesh, [Partial()]) for w in wholes]
        homes = [g._spec.replace([Shard(0)]) for g in grads]
        dtorch.session().flush()
        seen.clear()
        placed = gradients_together(grads, homes, "test")
        dtorch.session().flush()
        dtorch.zeros(1).item()
        assert len(seen) == 2, "one exchange on each worker"
        for whole, grad in zip(wholes, placed, strict=True):
            assert torch.equal(grad.to_torch(), whole * 4)


@pytest.mark.usefixtures("workers")
def test_dims_of_any_order() -> None:
    mesh = init_device_mesh("cpu", MESH, mesh_dim_names=("a", "b"))
    whole = torch.arange(5 * 6 * 70.0).reshape(5, 6, 70)
    for dims in itertools.permutations(range(3)):
        turned = dtorch.Tensor(whole, device_mesh=mesh).permute(*dims)
        for source, target in itertools.permutations([Shard(0), Shard(1), Shard(2), Replicate()], 2):
            moved = turned.redistribute(placements=[source, Replicate()]).redistribute(placements=[target, source])
            assert torch.equal(moved.to_torch(), whole.permute(*dims)), (dims, source, target)
