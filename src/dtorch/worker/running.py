"""Running packed calls: in C where that was built (``_fastrun.c``), else in Python."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from ..core.compiled import compiled
from ..core.program import Call, Calls
from .store import Store

Place = array
"""A call in a run: its number, and the numbers of its first word and its first scalar. Other threads may look at it."""

Plans = dict[int, Callable[[Store, Call], None]]


fastrun: Any = compiled("dtorch.worker._fastrun")
"""The C module, or None."""


def beginning() -> Place:
    """The place of the first call of a run."""
    return array("q", (0, 0, 0))


def run_calls(calls: Calls, place: Place, plans: Plans, store: Store) -> None:
    """Run calls from a place on, which ends after the last; an error is raised with the place at the call that failed."""
    if fastrun is not None:
        fastrun.run_calls(calls.words, calls.scalars, place, plans, store, Call)
        return
    for call in calls.unpacked(place[1], place[2]):
        plans[call.plan](store, call)
        step(place, call)


def step(place: Place, call: Call) -> None:
    """Move a place past its call."""
    place[0] += 1
    place[1] += 4 + len(call.inputs) + len(call.outputs)
    place[2] += len(call.scalars)
