"""The first call of a small operator with a shape that was never seen: planning, on meshes of one to four axes."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch

import dtorch
from dtorch import DeviceMesh, Shard
from dtorch.core.placements import Placement

from .client_only import client_only
from .figure import Figure
from .setting import Setting
from .timing import middle_half

WARM_UP = 5

Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Shape = tuple[int, int]
Split = Callable[[int, int], Placement]
"""Axis and number of the input to placement."""


@torch.no_grad()
def figures(setting: Setting) -> Iterator[Figure]:
    """Milliseconds of a first call, by number of mesh axes; two devices an axis."""
    count = setting.times(120, 5)
    shapes = new_shapes()
    for axes, limit, peer in LIMITS:
        mesh = setting.mesh((2,) * axes)
        add = first_calls(mesh, torch.add, alternating, [(s, s) for s in take(shapes, count)])
        moved = first_calls(mesh, torch.add, crossed, [(s, s) for s in take(shapes, count)])
        product = first_calls(mesh, torch.matmul, alternating, [(s, s[::-1]) for s in take(shapes, count)])
        with client_only():
            alone = first_calls(mesh, torch.add, alternating, [(s, s) for s in take(shapes, count)])
        yield Figure(
            name=f"planning.axes_{axes}",
            title=f"first call of an add with a new shape, mesh of {axes} {'axis' if axes == 1 else 'axes'}, all of them sharded",
            measured=statistics.median(add),
            limit=limit,
            unit="ms",
            spread=middle_half(add),
            peer=f"{peer} ms (torch DTensor)",
            notes=(
                f"of that the client {statistics.median(alone):.2f} ms; the rest compiles and runs the plan in the worker",
                f"inputs split differently {statistics.median(moved):.2f} ms; matmul {statistics.median(product):.2f} ms",
                f"plain eager {statistics.median(_plain_calls(setting, take(shapes, count))) * 1e6:.1f} us",
            ),
        )


def new_shapes() -> Iterator[Shape]:
    """Small shapes ``(rows, columns)``, each once."""
    return ((16 + rows, 16 + columns) for columns in itertools.count() for rows in range(64))


def take(shapes: Iterator[Shape], count: int) -> list[Shape]:
    """The next shapes, and some to warm up with."""
    return list(itertools.islice(shapes, count + WARM_UP))


def first_calls(mesh: DeviceMesh, call: Call, split: Split, shapes: Sequence[tuple[Shape, Shape]]) -> list[float]:
    """Milliseconds of the first call with each pair of input shapes, planned, defined and run; without the warm-up."""
    client = dtorch.session()
    times = []
    for pair in shapes:
        inputs = [
            dtorch.zeros(*shape, device_mesh=mesh, placements=[split(axis, number) for axis in range(mesh.ndim)])
            for number, shape in enumerate(pair)
        ]
        client.flush()
        planned, start = client.planned, time.perf_counter()
        out = call(*inputs)
        client.flush()
        times.append((time.perf_counter() - start) * 1e3)
        assert client.planned == planned + 1, "the shape was known"
        del out
    return times[WARM_UP:]


def alternating(axis: int, number: int) -> Placement:
    """Both inputs alike: dims in turn, so that from three axes on two axes split one dim."""
    return Shard(axis % 2)


def crossed(axis: int, number: int) -> Placement:
    """The second input split along the other dim, so that something must move."""
    return Shard((axis + number) % 2)


def _plain_calls(setting: Setting, shapes: Sequence[Shape]) -> list[float]:
    times = []
    for shape in shapes:
        a, b = (torch.zeros(shape, device=setting.device) for _ in range(2))
        start = time.perf_counter()
        torch.add(a, b)
        times.append(time.perf_counter() - start)
    return times


LIMITS = ((1, 0.6, 2.5), (2, 0.8, 8), (3, 1.0, 60), (4, 1.5, 400))
