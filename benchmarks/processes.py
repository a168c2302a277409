"""Worker processes: what the client pays for a small operator, and what moving a large tensor takes beside a bare collective."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dtorch
from dtorch import Partial, Replicate, init_device_mesh
from dtorch.core.program import Barrier
from dtorch.tensor import client as clients
from dtorch.tensor.client import Client

from .add import TIMES, adds, placed
from .client_only import client_only
from .figure import Figure
from .setting import Setting
from .timing import Pairs, Sample, clocked

WORKERS = (2, 8)
LARGE = 16 << 20
"""Elements of the tensor that is moved: 64 MiB."""


def figures(setting: Setting) -> Iterator[Figure]:
    """Client time with worker processes, to the embedded session; bandwidth, to gloo's own."""
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    for workers in WORKERS:
        yield _client(setting, (a, b), workers)
    for workers in (2, 4):
        yield _bandwidth(setting, workers)


@contextmanager
def _processes(workers: int) -> Iterator[Client]:
    """A session of worker processes in place of the running one, which comes back afterwards."""
    before = clients.running()
    clients.set_current(None)
    client = dtorch.init(workers=workers)
    try:
        yield client
    finally:
        dtorch.shutdown()
        clients.set_current(before)


@torch.no_grad()
def _client(setting: Setting, pair: tuple[torch.Tensor, torch.Tensor], workers: int) -> Figure:
    embedded = dtorch.session()
    plain = adds(*placed(*pair, setting, 1))
    base: list[Sample] = []
    other: list[Sample] = []
    with _processes(workers) as client:
        ours = adds(*placed(*pair, setting, workers))
        for number in range(setting.times(21, 3)):
            clients.set_current(embedded)
            with client_only():
                base.append(clocked(plain))
            clients.set_current(client)
            other.append(clocked(ours))
            # What the workers do is not the client's time.
            client.request(Barrier())
            if not number:
                base.clear()
                other.clear()
    pairs = Pairs(base=base, other=other)
    return Figure(
        name=f"processes.client_{workers}",
        title=f"client processor time of an 8x8 add with {workers} worker processes, to embedded, client only",
        measured=pairs.cpu_ratio,
        limit=1.5,
        peer="1.9 ms an operator (Monarch 0.7 on a CPU)",
        notes=(f"by the clock {pairs.ratio:.2f}x, per operator {pairs.times(1e-6, 'us', TIMES)}",),
    )


def _bandwidth(setting: Setting, workers: int) -> Figure:
    times = setting.times(9, 2)
    gloo = _gloo(workers, times)
    with _processes(workers) as client:
        mesh = init_device_mesh("cpu", workers)
        pieces = [torch.ones(LARGE) for _ in range(workers)]
        x = dtorch.from_local(pieces, mesh, [Partial()])
        taken = []
        for _ in range(times + 1):
            client.request(Barrier())
            taken.append(clocked(lambda: (x.redistribute(placements=[Replicate()]), client.request(Barrier()))).wall_s)
    ours = sorted(taken[1:])[times // 2]
    return Figure(
        name=f"processes.all_reduce_{workers}",
        title=f"all-reduce of 64 MiB on {workers} worker processes, time to gloo's all_reduce",
        measured=ours / gloo,
        limit=1 / 0.85,
        notes=(f"{gloo * 1e3:.0f} ms -> {ours * 1e3:.0f} ms, a request and its answer included",),
    )


def _gloo(workers: int, times: int) -> float:
    """Seconds that the bare collective takes between so many processes; the median."""
    context: Any = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        answers = context.SimpleQueue()
        place = str(Path(directory) / "rendezvous")
        ranks = [context.Process(target=_rank, args=(n, workers, place, times, answers)) for n in range(workers)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        return answers.get()


def _rank(number: int, workers: int, place: str, times: int, answers: Any) -> None:
    torch.set_num_threads(1)
    group = dist.ProcessGroupGloo(dist.FileStore(place, workers), number, workers, timedelta(seconds=60))
    tensor, taken = torch.ones(LARGE), []
    for _ in range(times + 1):
        group.barrier().wait()
        # The sum replaces what is summed, so each time begins with a copy, as a value that stays would need.
        taken.append(clocked(lambda: group.allreduce([tensor.clone()]).wait()).wall_s)
    if number == 0:
        answers.put(sorted(taken[1:])[times // 2])
