"""A small operator: adding two 8x8 tensors, warm, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

import dtorch
from dtorch import Shard

from .client_only import client_only
from .figure import Figure
from .setting import Setting
from .timing import Pairs, Work, paired

TIMES = 2048
"""Operators between two looks at the clock: a whole number of the client's batches."""

TIMES_EXECUTED = 64
"""The same where every piece of a large mesh is computed."""

SIZES = (64, 512)

Pair = tuple[torch.Tensor, torch.Tensor]


def adds(a: torch.Tensor, b: torch.Tensor, times: int = TIMES) -> Callable[[], None]:
    """Additions of two tensors, so many times."""

    def run() -> None:
        for _ in range(times):
            _ = a + b

    return run


@torch.no_grad()
def figures(setting: Setting) -> Iterator[Figure]:
    """The client's time for one small operator, to eager and to larger meshes."""
    a, b = torch.randn(8, 8, device=setting.device), torch.randn(8, 8, device=setting.device)
    plain = setting.plain(adds(a, b))
    x, y = placed(a, b, setting, 1)
    total = _warm(plain, setting.ours(adds(x, y)), setting)
    client = _client_only(plain, adds(x, y), setting)
    yield Figure(
        name="add.client",
        title="client time of an 8x8 add, to plain eager",
        measured=client.ratio,
        limit=6,
        spread=client.spread,
        peer="6.9x (torch DTensor 2.13, one rank; executes on one shard only)",
        notes=(
            f"per operator {client.times(1e-6, 'us', TIMES)}; processor time {client.cpu_ratio:.2f}x",
            f"with execution in the same thread {total.ratio:.2f}x, {total.times(1e-6, 'us', TIMES)}",
        ),
    )
    for size in SIZES:
        yield _on_mesh(setting, (x, y), placed(a, b, setting, size), size)


def _on_mesh(setting: Setting, one: Pair, many: Pair, size: int) -> Figure:
    """The client's time on a larger mesh, to one device."""
    sides = [setting.ours(adds(*pair, TIMES_EXECUTED)) for pair in (one, many)]
    total = _warm(*sides, setting)
    client = _client_only(adds(*one), adds(*many), setting)
    return Figure(
        name=f"add.client_{size}",
        title=f"the same on {size} devices, Shard(0), to one device",
        measured=client.ratio,
        limit=1.3,
        spread=client.spread,
        peer="18x at 8 devices, 80x at 32 (JAX 0.10 on a CPU, executes within that time)",
        notes=(
            f"per operator {client.times(1e-6, 'us', TIMES)}; processor time {client.cpu_ratio:.2f}x",
            f"with execution of all pieces on the same core {total.ratio:.1f}x, {total.times(1e-6, 'us', TIMES_EXECUTED)}",
        ),
    )


def placed(a: torch.Tensor, b: torch.Tensor, setting: Setting, size: int) -> Pair:
    """Both tensors on a mesh of one axis, split on their first dim."""
    mesh = setting.mesh((size,))
    x, y = (dtorch.Tensor(t, device_mesh=mesh, placements=[Shard(0)]) for t in (a, b))
    return x, y


def _client_only(base: Work, other: Work, setting: Setting) -> Pairs:
    with client_only():
        return _warm(base, other, setting)


def _warm(base: Work, other: Work, setting: Setting) -> Pairs:
    base()
    other()
    return paired(base, other, setting.times(41, 3))
