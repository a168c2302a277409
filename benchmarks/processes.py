"""Worker processes: what the client pays for a small operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

import dtorch
from dtorch.core.program import Barrier
from dtorch.tensor import client as clients
from dtorch.tensor.client import Client

from .add import TIMES, adds, placed
from .client_only import client_only
from .figure import Figure
from .setting import Setting
from .timing import Pairs, Sample, Work, clocked

WORKERS = (2, 8)


def figures(setting: Setting) -> Iterator[Figure]:
    """Client time with worker processes, to the embedded session."""
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    for workers in WORKERS:
        yield _client(setting, (a, b), workers)


@contextmanager
def session(workers: int) -> Iterator[Client]:
    """A session of worker processes in place of the running one, which comes back afterwards."""
    before = clients.running()
    clients.set_current(None)
    client = dtorch.init(workers=workers)
    try:
        yield client
    finally:
        dtorch.shutdown()
        clients.set_current(before)


def beside(client: Client, issue: Work, theirs: Callable[[], float], rounds: int) -> tuple[Pairs, float]:
    """Time what a client issues, until its workers have done it, in turn with another side. The first round warms both up.

    Args:
        theirs: lets the other side run; the seconds that it took.

    Returns:
        The pairs, and the least processor time of the client for ``issue``, in seconds.
    """
    base: list[Sample] = []
    other: list[Sample] = []
    issued: list[Sample] = []
    for number in range(rounds):
        client.request(Barrier())
        ours = clocked(lambda: (issued.append(clocked(issue)), client.request(Barrier())))
        taken = theirs()
        if number:
            other.append(ours)
            base.append(Sample(wall_s=taken, cpu_s=taken))
    return Pairs(base=base, other=other), min(sample.cpu_s for sample in issued)


@torch.no_grad()
def _client(setting: Setting, pair: tuple[torch.Tensor, torch.Tensor], workers: int) -> Figure:
    embedded = dtorch.session()
    plain = adds(*placed(*pair, setting, 1))
    base: list[Sample] = []
    other: list[Sample] = []
    with session(workers) as client:
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
