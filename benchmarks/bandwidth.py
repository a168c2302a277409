"""Worker processes: what moving a large tensor takes, beside the bare collective of gloo between as many processes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

import dtorch
from dtorch import Partial, Placement, Replicate, Shard, init_device_mesh
from dtorch.tensor.client import Client

from .figure import Figure
from .processes import beside, session
from .ranks import Ranks, ranks
from .setting import Setting

LARGE = 16 << 20
"""Elements of the tensor that is moved: 64 MiB."""

ROW, RUNS = 4096, 3

KINDS: dict[str, tuple[Placement, Placement]] = {
    "all_reduce": (Partial(), Replicate()),
    "all_gather": (Shard(0), Replicate()),
    "reduce_scatter": (Partial(), Shard(0)),
    "all_to_all": (Shard(0), Shard(1)),
    "all_to_all_unpacked": (Shard(0), Shard(1)),
}
"""Redistributions, each of which is one collective. Joined or split along the rows, as gloo does; or rows to columns."""


def figures(setting: Setting) -> Iterator[Figure]:
    """Time of each collective, to gloo's own; on as many threads for operators as the setting has."""
    for workers in (2, 4):
        with ranks(workers, setting.threads, Bare) as gloo, session(workers) as client:
            for kind in KINDS:
                yield _figure(setting, workers, kind, client, gloo)


def _figure(setting: Setting, workers: int, kind: str, client: Client, gloo: Ranks) -> Figure:
    mesh = init_device_mesh("cpu", workers)
    source, target = KINDS[kind]
    if isinstance(source, Partial):
        x = dtorch.from_local([torch.ones(LARGE // ROW, ROW) for _ in range(workers)], mesh, [source])
    else:
        x = dtorch.Tensor(torch.ones(LARGE // ROW, ROW), device_mesh=mesh, placements=[source])
    ours, theirs = lambda: [x.redistribute(placements=[target]) for _ in range(RUNS)], lambda: gloo.run(kind, RUNS)
    pairs, _ = beside(client, ours, theirs, setting.times(16, 3))
    return Figure(
        name=f"bandwidth.{kind}_{workers}",
        title=f"{kind} of 64 MiB on {workers} worker processes, time to gloo's",
        measured=pairs.ratio,
        limit=1 / 0.85,
        spread=pairs.spread,
        notes=(f"{pairs.times(1e-3, 'ms', RUNS)}; {RUNS} in a row, and a request and its answer; threads: {setting.threads}",),
    )


class Bare:
    """Gloo's collectives, each into fresh memory, for the results of a redistribution are new values."""

    def __init__(self, rank: int, workers: int) -> None:
        self._workers = workers
        self._whole, self._piece = torch.ones(LARGE), torch.ones(LARGE // workers)

    def __call__(self, kind: str) -> None:
        """One collective."""
        getattr(self, kind)()

    def all_reduce(self) -> None:
        """Of a copy, for what was summed would be lost."""
        dist.all_reduce(self._whole.clone())

    def all_gather(self) -> None:
        """Into one tensor."""
        dist.all_gather_into_tensor(torch.empty(LARGE), self._piece)

    def reduce_scatter(self) -> None:
        """Out of one tensor."""
        dist.reduce_scatter_tensor(torch.empty_like(self._piece), self._whole)

    def all_to_all(self) -> None:
        """Rows become columns on this side too: gloo takes parts that lie one after another, so they are packed first."""
        columns = torch.cat(self._piece.view(-1, ROW).chunk(self._workers, 1))
        dist.all_to_all_single(torch.empty_like(columns), columns)

    def all_to_all_unpacked(self) -> None:
        """The collective alone, as if what goes to each lay in one piece already: less than the redistribution has to do."""
        dist.all_to_all_single(torch.empty_like(self._piece), self._piece)
