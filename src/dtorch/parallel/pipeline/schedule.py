"""Pipeline schedules as data: which forward and backward passes of which micro-batch each device runs, in which order.

Stage ``k`` lies on device ``k % devices``; a device with several stages has as many *chunks* of the model. Every schedule
here is one rule: some forward units to warm up, then forward and backward by turns, then what is left of the backward.
They differ in how long they warm up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ...core.errors import UsageError, four_parts
from ...core.placements import balanced


@dataclass(frozen=True, slots=True)
class Forward:
    """A stage's forward pass of one micro-batch."""

    stage: int
    micro: int


@dataclass(frozen=True, slots=True)
class Backward:
    """A stage's backward pass of one micro-batch."""

    stage: int
    micro: int


Unit = Forward | Backward


@dataclass(frozen=True)
class Schedule:
    """An order of work.

    Attributes:
        name: its kind.
        stages: number of stages of the model.
        micro_batches: number of micro-batches.
        devices: for each device of the pipeline its units in order.
    """

    name: str
    stages: int
    micro_batches: int
    devices: tuple[tuple[Unit, ...], ...]

    @cached_property
    def order(self) -> tuple[Unit, ...]:
        """One order for all units, as a single program issues them: each device's own is kept, and each unit follows those
        that it needs. Units that may run at the same time stand together, the last device's first, so that what a device
        sends is asked for before its next unit.
        """
        issued: set[Unit] = set()
        order: list[Unit] = []
        left = [list(units) for units in self.devices]
        while any(left):
            ready = [units for units in reversed(left) if units and issued.issuperset(self.needs(units[0]))]
            assert ready, f"a schedule that waits for itself: {[units[:1] for units in left]}"
            now = [units.pop(0) for units in ready]
            issued.update(now)
            order += now
        return tuple(order)

    def needs(self, unit: Unit) -> tuple[Unit, ...]:
        """The units whose results a unit uses."""
        k, i = unit.stage, unit.micro
        if isinstance(unit, Forward):
            return (Forward(k - 1, i),) if k else ()
        return (Forward(k, i), *([Backward(k + 1, i)] if k + 1 < self.stages else []))

    def alive(self, device: int) -> int:
        """The most stage passes whose activations a device holds at once: forward run, backward not yet."""
        most = now = 0
        for unit in self.devices[device]:
            now += 1 if isinstance(unit, Forward) else -1
            most = max(most, now)
        return most


@lru_cache(maxsize=64)
def make_schedule(name: str, devices: int, micro_batches: int, chunks: int = 1, backward: bool = True) -> Schedule:
    """A schedule for ``devices`` with ``chunks`` stages each.

    Args:
        name: ``"gpipe"``, ``"1f1b"`` or ``"interleaved"``.
        devices: length of the pipeline.
        micro_batches: how many there are.
        chunks: stages on each device.
        backward: False leaves the backward units out.

    Raises:
        UsageError: an unknown name, or one that does not go with this number of chunks.
    """
    check_schedule(name, chunks)
    groups = _groups(devices, micro_batches)
    units = []
    for device in range(devices):
        forward: list[Unit] = [Forward(chunk * devices + device, i) for chunk, i in _turns(groups, range(chunks))]
        back: list[Unit] = [Backward(chunk * devices + device, i) for chunk, i in _turns(groups, range(chunks)[::-1])]
        ahead = WARM_UP[name](device, devices, len(forward), chunks, len(groups[0])) if backward else len(forward)
        units.append(tuple(_by_turns(forward, back if backward else [], ahead)))
    return Schedule(name, devices * chunks, micro_batches, tuple(units))


def check_schedule(name: str, chunks: int) -> None:
    """Refuse a schedule that is unknown, or does not go with this number of stages on each device.

    Raises:
        UsageError: it is so.
    """
    where = "pipeline(model, micro_batches, schedule)"
    if name not in WARM_UP:
        raise UsageError(four_parts(f"schedule={name!r}", f"a schedule is one of {sorted(WARM_UP)}", where, "use one of these"))
    if name == "1f1b" and chunks > 1:
        raise UsageError(
            four_parts(
                f"schedule='1f1b' for a model with {chunks} stages on each device",
                "1f1b is the order of one stage on each device",
                where,
                "use schedule='interleaved', or parallelize without virtual_stages",
            )
        )
    if name == "interleaved" and chunks == 1:
        raise UsageError(
            four_parts(
                "schedule='interleaved' for a model with one stage on each device",
                "stages interleave where each device has several",
                where,
                "call parallelize(model, mesh, virtual_stages=2) first, or use schedule='1f1b'",
            )
        )


def _groups(devices: int, micro_batches: int) -> list[range]:
    """Micro-batches that pass through a device's chunks together: as many as there are devices, or a few more."""
    starts, groups = 0, []
    for size in balanced(micro_batches, max(1, micro_batches // devices)):
        groups.append(range(starts, starts + size))
        starts += size
    return groups


def _turns(groups: list[range], chunks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(chunk, micro-batch) as a device comes by them: a group through one chunk after the other, then the next group."""
    return ((chunk, i) for group in groups for chunk in chunks for i in group)


def _by_turns(forward: list[Unit], backward: list[Unit], ahead: int) -> Iterator[Unit]:
    yield from forward[:ahead]
    rest = forward[ahead:]
    for i, unit in enumerate(backward):
        yield from rest[i : i + 1]
        yield unit


def _all(device: int, devices: int, units: int, chunks: int, group: int) -> int:
    return units


def _until_the_first_returns(device: int, devices: int, units: int, chunks: int, group: int) -> int:
    return min(units, devices - 1 - device)


def _until_the_first_returns_through_all_chunks(device: int, devices: int, units: int, chunks: int, group: int) -> int:
    return min(units, 2 * (devices - 1 - device) + (chunks - 1) * group)


# Schedule -> forward units that a device runs before its first backward unit's turn comes, of (device, devices, its forward
# units, its chunks, micro-batches of the first group).
WARM_UP: dict[str, Callable[[int, int, int, int, int], int]] = {
    "gpipe": _all,
    "1f1b": _until_the_first_returns,
    "interleaved": _until_the_first_returns_through_all_chunks,
}
