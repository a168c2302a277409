"""What the controller knows, without I/O: which worker hosts which device, which plans exist, what was last asked."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..core.grid import Grid, Here
from ..core.hosting import ALONE, Hosting
from ..core.program import Call, Calls, DefinePlan, Draw, Forget, Instruction, Put

STORY_LENGTH = 8
"""Instructions that are remembered, a run of calls as one, and lines that are told."""

STORY_PER_BATCH = 8
"""Instructions of a batch, and calls of a run, that are told at most."""


@dataclass(frozen=True, slots=True)
class BatchArrived:
    """The client sent a batch whose first Call or Draw has sequence number ``first``."""

    first: int
    batch: list[Instruction]


@dataclass(slots=True)
class Counters:
    """What has passed: Calls and Draws, batches, and bytes of tensors that clients put."""

    calls: int = 0
    batches: int = 0
    put_nbytes: int = 0


class ControllerState:
    """Routing, plan registry, counters and story. Batches go on whole but for what is put, so a Call costs nothing here."""

    def __init__(self, hosting: Hosting = ALONE) -> None:
        self.hosting = hosting
        self.counters = Counters()
        self.plans: dict[int, str] = {}
        # Entries are written out only when someone asks. No entry may hold a Put, which would keep its tensors alive.
        self._story: deque[Calls | Draw | str] = deque(maxlen=STORY_LENGTH)

    def handle(self, event: BatchArrived) -> list[tuple[Sequence[int], list[Instruction]]]:
        """What to send to which workers: all get the same batch, but each only what it is to hold of what is put."""
        self._note(event.first, event.batch)
        workers = tuple(range(self.hosting.workers))
        if len(workers) == 1 or not any(isinstance(i, Put) for i in event.batch):
            return [(workers, event.batch)]
        return [((worker,), self._for(worker, event.batch)) for worker in workers]

    def _for(self, worker: int, batch: list[Instruction]) -> list[Instruction]:
        here = Here(self.hosting, worker)
        kept: list[Instruction] = []
        for instruction in batch:
            if not isinstance(instruction, Put):
                kept.append(instruction)
                continue
            held = Grid(instruction.mesh, instruction.axes, here).held
            if held:
                kept.append(msgspec.structs.replace(instruction, tensors=[instruction.tensors[piece] for piece in held]))
        return kept

    def story(self) -> str:
        """The last few instructions, oldest first, one a line."""
        lines = [line for entry in self._story for line in self._lines(entry)]
        return "\n".join(lines[-STORY_LENGTH:])

    def _note(self, first: int, batch: list[Instruction]) -> None:
        self.counters.batches += 1
        for instruction in batch:
            if isinstance(instruction, Calls):
                self.counters.calls += instruction.count
            elif isinstance(instruction, DefinePlan):
                self.plans[instruction.plan] = instruction.operator
            elif isinstance(instruction, Forget):
                for plan in instruction.plans:
                    self.plans.pop(plan, None)
            elif isinstance(instruction, Put):
                self.counters.put_nbytes += sum(t.nbytes for t in instruction.tensors)
            elif isinstance(instruction, Draw):
                self.counters.calls += 1
        self._story.append(f"batch of {len(batch)} from call {first}")
        self._story.extend(i if isinstance(i, Calls | Draw) else _title(i) for i in batch[-STORY_PER_BATCH:])

    def _lines(self, entry: Calls | Draw | str) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        calls = [entry] if isinstance(entry, Draw) else list(entry.unpacked())[-STORY_PER_BATCH:]
        return [self._line(call) for call in calls]

    def _line(self, call: Call | Draw) -> str:
        name = self.plans.get(call.plan, "forgotten")
        return f"  {type(call).__name__} {name} (plan {call.plan}): values {call.inputs} -> {call.outputs}"


def merged(answers: Sequence[Any]) -> Any:
    """One answer of the answers of all workers: of lists each part from whoever gave it, else the first that was given."""
    given = [answer for answer in answers if answer is not None]
    if not given or not isinstance(given[0], list):
        return given[0] if given else None
    return [next((part for part in parts if part is not None), None) for parts in zip(*given, strict=True)]


def _title(instruction: Instruction) -> str:
    return f"  {type(instruction).__name__} {getattr(instruction, 'handle', '')}".rstrip()
