"""Placements to try, and an oracle for redistribution that reads local tensors only and so trusts no redistribution."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

import dtorch
from dtorch import DeviceMesh, Partial, Replicate, Shard
from dtorch.core.mesh import coordinates
from dtorch.core.placements import Placement, Placements, balanced
from dtorch.core.spec import Spec

OPS = ("sum", "avg", "max", "min", "prod")
Cut = Callable[[int, int], Sequence[int]]


def uneven(n: int, k: int) -> tuple[int, ...]:
    """All but the last piece as short as can be, none empty while n >= k."""
    first = (min(1, n),) * (k - 1) if n >= k else (0,) * (k - 1)
    return (*first, n - sum(first))


def lopsided(n: int, k: int) -> tuple[int, ...]:
    """The second device holds everything, the others nothing."""
    return tuple(n if i == 1 % k else 0 for i in range(k))


def every_placement(
    mesh: DeviceMesh, shape: Sequence[int], ops: Sequence[str] = OPS, cuts: Sequence[Cut] = (balanced, uneven, lopsided)
) -> list[Placements]:
    """All placements of a tensor: on each axis replicated, partial, or split on each dim by each cut of what is left of it."""
    rows: list[Placements] = [()]
    for axis in range(mesh.ndim):
        rows = [(*row, p) for row in rows for p in _choices(mesh, row, axis, shape, ops, cuts)]
    return rows


def _choices(
    mesh: DeviceMesh, outer: Placements, axis: int, shape: Sequence[int], ops: Sequence[str], cuts: Sequence[Cut]
) -> Iterator[Placement]:
    yield Replicate()
    yield from (Partial(op) for op in ops)
    spec = Spec.make(mesh, (*outer, *[Replicate()] * (mesh.ndim - axis)), shape, torch.float32)
    for d, n in enumerate(shape):
        axes = spec.sharding_axes(d)
        segments = spec.sizes_on(axes[-1]) if axes else (n,)
        for cut in cuts:
            yield Shard(d, tuple(s for m in segments for s in cut(m, mesh.shape[axis])))


def assert_holds(tensor: dtorch.Tensor, expected: torch.Tensor, where: object = "") -> None:
    """Assert that the local tensors are exactly what ``expected`` is under the tensor's placements."""
    spec, shards = tensor._spec, dict(zip(coordinates(tensor.device_mesh.shape), tensor.shards, strict=True))
    assert tensor.shape == expected.shape and tensor.dtype == expected.dtype, where
    partial = [a for a, p in enumerate(spec.placements) if isinstance(p, Partial)]
    for coord in shards:
        if any(coord[a] for a in partial):
            continue
        offset, size = spec.local_box(coord)
        want = expected[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
        got = _reduced(spec, shards, coord, partial)
        assert got.shape == want.shape and got.dtype == want.dtype, (
            f"{tuple(got.shape)} {got.dtype} at {coord}, expected {tuple(want.shape)} {want.dtype} {where}"
        )
        assert torch.equal(got, want), f"at {coord}: {got}, expected {want} {where}"


def _reduced(spec: Spec, shards: dict, coord: tuple[int, ...], partial: Sequence[int]) -> torch.Tensor:
    """The value at a coordinate, partial axes reduced, the last one first."""
    if not partial:
        return shards[coord]
    axis, *rest = partial
    line = [_reduced(spec, shards, (*coord[:axis], i, *coord[axis + 1 :]), rest) for i in range(spec.mesh.shape[axis])]
    placement = spec.placements[axis]
    assert isinstance(placement, Partial)
    return reduce(torch.stack(line), placement.reduce_op)


def reduce(stacked: torch.Tensor, op: str) -> torch.Tensor:
    """Reduce the first dim; bool sums by *or*, integers average rounding down."""
    if op in ("max", "min"):
        return getattr(stacked, f"a{op}")(0)
    if stacked.dtype == torch.bool:
        return stacked.all(0) if op == "prod" else stacked.any(0)
    if op == "prod":
        return stacked.prod(0).to(stacked.dtype)
    if op == "avg" and not (stacked.is_floating_point() or stacked.is_complex()):
        exact = [sum(column) // len(stacked) for column in stacked.flatten(1).t().tolist()]
        return torch.tensor(exact, dtype=stacked.dtype).view(stacked.shape[1:])
    total = stacked.sum(0).to(stacked.dtype)
    return total / len(stacked) if op == "avg" else total
