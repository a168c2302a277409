"""A simulated clock for schedules: when each unit runs, how long devices stand idle, and a picture of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .schedule import Backward, Schedule, Unit

Duration = Callable[[Unit], float]


@dataclass(frozen=True)
class Timeline:
    """When the units of a schedule run.

    Attributes:
        schedule: what was timed.
        spans: (start, end) of each unit; the clock starts at 0.
    """

    schedule: Schedule
    spans: Mapping[Unit, tuple[float, float]]

    @property
    def makespan(self) -> float:
        """End of the last unit."""
        return max(end for _, end in self.spans.values())

    def bubble(self, device: int) -> float:
        """Part of the time until the end that a device stands idle, 0 to 1."""
        spans = (self.spans[unit] for unit in self.schedule.devices[device])
        return 1 - sum(end - start for start, end in spans) / self.makespan


def simulate(schedule: Schedule, duration: Duration | None = None, transfer: float = 0.0) -> Timeline:
    """Run a schedule by the clock: each device takes its units in order, each as soon as what it needs has arrived.

    Args:
        schedule: what to run.
        duration: time that a unit takes; by default every unit takes 1.
        transfer: time that a result takes to another device, during which neither device is kept.
    """
    spans: dict[Unit, tuple[float, float]] = {}
    free = [0.0] * len(schedule.devices)
    for unit in schedule.order:
        device = unit.stage % len(free)
        arrived = (spans[need][1] + (transfer if need.stage % len(free) != device else 0.0) for need in schedule.needs(unit))
        start = max(free[device], *arrived) if schedule.needs(unit) else free[device]
        free[device] = start + (duration(unit) if duration else 1.0)
        spans[unit] = start, free[device]
    return Timeline(schedule, spans)


def draw(schedule: Schedule) -> str:
    """A row for each device and a column for each step, all units taken as equally long: ``F3`` is the forward pass of
    micro-batch 3, ``B3b`` the backward pass of a device's second chunk.
    """
    timeline, devices = simulate(schedule), len(schedule.devices)
    rows = [[""] * round(timeline.makespan) for _ in range(devices)]
    for unit, (start, _) in timeline.spans.items():
        chunk = chr(ord("a") + unit.stage // devices) if schedule.stages > devices else ""
        kind = "B" if isinstance(unit, Backward) else "F"
        rows[unit.stage % devices][round(start)] = f"{kind}{unit.micro}{chunk}"
    width = max(len(cell) for row in rows for cell in row)
    lines = [f"device {d}  " + " ".join((cell or ".").ljust(width) for cell in row).rstrip() for d, row in enumerate(rows)]
    idle = sum(timeline.bubble(d) for d in range(devices)) / devices
    return "\n".join([f"{schedule.name}: {schedule.micro_batches} micro-batches, idle {idle:.0%}", *lines])
