"""Operators a second through a controller to workers that acknowledge without computing: the cost of having many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import torch

from dtorch.core.program import Barrier
from dtorch.tensor import client as clients
from dtorch.tensor.client import Client
from dtorch.testing.stubs import stub_session

from .add import TIMES, adds, placed
from .figure import Figure
from .setting import Setting
from .timing import paired

WORKERS = (8, 64)
ROUNDS = 40
"""Times as many operators as ``add`` takes between two waits, so that the way is full."""


@torch.no_grad()
def figures(setting: Setting) -> Iterator[Figure]:
    """Time of an operator with 8 and 64 workers, to that with one; all of it, until the last has acknowledged the last."""
    pair = torch.randn(8, 8), torch.randn(8, 8)
    for workers in WORKERS:
        with ExitStack() as sessions:
            one, many = (_through(setting, pair, sessions.enter_context(stub_session(n)), n) for n in (1, workers))
            one()
            many()
            measured = paired(one, many, setting.times(15, 2))
        yield Figure(
            name=f"throughput.stubs_{workers}",
            title=f"time of an operator through the controller to {workers} stub workers, to one",
            measured=measured.ratio,
            limit=1.25,
            spread=measured.spread,
            notes=(measured.times(1e-6, "us an operator", ROUNDS * TIMES), "client, controller and all stubs share the machine"),
        )


def _through(setting: Setting, pair: tuple[torch.Tensor, torch.Tensor], client: Client, workers: int) -> Callable[[], None]:
    clients.set_current(client)
    work = adds(*placed(*pair, setting, workers))

    def run() -> None:
        clients.set_current(client)
        for _ in range(ROUNDS):
            work()
        client.request(Barrier())

    return run
