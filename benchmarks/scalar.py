"""A number that changes at every step: plans made, and memory that must not grow."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator

import psutil
import torch

import dtorch

from .figure import Figure
from .setting import Setting

STEPS = 10_000
WARM_UP = 5
"""Times as many steps, before growth is counted."""

EVERY = 500
"""Steps between two reads of a value, as in a loop that logs its loss."""


@torch.no_grad()
def figures(setting: Setting) -> Iterator[Figure]:
    """Plans made in ``STEPS`` steps, and bytes by which the process grew a step."""
    every = setting.times(EVERY, EVERY // 10)
    steps = every * (STEPS // EVERY)
    x = dtorch.Tensor(torch.randn(8, 8), device_mesh=setting.mesh())
    before = dtorch.session().planned
    resident = Growth(lambda: psutil.Process().memory_info().rss)
    scale(x, steps, every, resident)
    plans = dtorch.session().planned - before
    tracemalloc.start()
    traced = Growth(lambda: tracemalloc.get_traced_memory()[0])
    # What the tracer has not seen made is replaced bit by bit, by blocks that it counts: a long warm-up.
    scale(x, WARM_UP * steps, every, traced)
    traced.readings.clear()
    scale(x, steps, every, traced)
    tracemalloc.stop()
    yield Figure(
        name="scalar.plans",
        title=f"plans made in {steps} steps with a scalar that changes every step",
        measured=plans,
        limit=1,
        unit="plan" if plans == 1 else "plans",
        peer="one cache entry a value (torch DTensor)",
        notes=("the step is x * scale; plain eager makes none",),
    )
    yield Figure(
        name="scalar.memory",
        title="growth of Python's memory in these steps",
        measured=max(0.0, traced.total / traced.steps),
        limit=1,
        unit="B a step",
        peer="grows with each value (torch DTensor)",
        notes=(
            f"measured at reads of a value, every {every} steps, after a warm-up: {traced.total} B in "
            f"{traced.steps} steps (tracemalloc); the whole process {resident.total / 1024:.0f} KiB (resident set)",
            f"between two reads at most {traced.high / 1024:.0f} KiB more, for error reports and the batch",
        ),
    )


class Growth:
    """Readings of a meter at each read of a value; the first quarter warms up."""

    def __init__(self, meter: Callable[[], int]) -> None:
        self.meter = meter
        self.readings: list[tuple[int, int]] = []
        self.high = 0

    def read(self, step: int) -> None:
        """Take a reading after a read."""
        # Also empties Python's free lists, whose blocks come and go.
        gc.collect()
        self.readings.append((step, self.meter()))

    def peek(self) -> None:
        """Take a reading before a read."""
        if self.readings:
            self.high = max(self.high, self.meter() - self.readings[-1][1])

    @property
    def steps(self) -> int:
        """Steps from the end of the warm-up."""
        return self.readings[-1][0] - self._start[0]

    @property
    def total(self) -> int:
        """Bytes gained since the warm-up."""
        return self.readings[-1][1] - self._start[1]

    @property
    def _start(self) -> tuple[int, int]:
        return self.readings[len(self.readings) // 4]


def scale(x: torch.Tensor, steps: int, every: int, growth: Growth) -> None:
    """Multiply by another number at each step."""
    for step in range(steps):
        _ = x * (1.0 + step * 1e-4)
        if (step + 1) % every == 0:
            growth.peek()
            x.to_torch()
            growth.read(step)
