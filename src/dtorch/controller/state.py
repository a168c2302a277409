"""What the controller knows, without I/O: which worker hosts which device, which plans exist, what was last asked."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ..core.errors import InternalError
from ..core.program import Call, Calls, DefinePlan, Draw, Forget, Instruction, Put

STORY_LENGTH = 32
"""Instructions that are remembered; a run of calls counts as one."""

STORY_PER_BATCH = 8
"""Instructions of a batch, and calls of a run, that are told at most."""


@dataclass(frozen=True, slots=True)
class BatchArrived:
    """The client sent a batch whose first Call or Draw has sequence number ``first``."""

    first: int
    batch: list[Instruction]


@dataclass(frozen=True, slots=True)
class DevicesAssigned:
    """A worker now hosts these logical devices of a type."""

    worker: str
    device_type: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendBatch:
    """Send a batch to a worker."""

    worker: str
    first: int
    batch: list[Instruction]


Event = BatchArrived | DevicesAssigned


@dataclass(slots=True)
class Counters:
    """What has passed: Calls and Draws, batches, and bytes of tensors that clients put."""

    calls: int = 0
    batches: int = 0
    put_nbytes: int = 0


class ControllerState:
    """Device map, plan registry, counters and story. Batches go on whole, so a Call costs nothing here.

    Args:
        default_worker: hosts every device that is not assigned otherwise.
    """

    def __init__(self, default_worker: str) -> None:
        self.default_worker = default_worker
        self.counters = Counters()
        self.plans: dict[int, str] = {}
        self._hosts: dict[tuple[str, int], str] = {}
        # Entries are written out only when someone asks. No entry may hold a Put, which would keep its tensors alive.
        self._story: deque[Calls | Draw | str] = deque(maxlen=STORY_LENGTH)

    def handle(self, event: Event) -> list[SendBatch]:
        """What to do about an event.

        Raises:
            InternalError: devices are assigned to a second worker, which a batch sent whole could not serve.
        """
        if isinstance(event, DevicesAssigned):
            self._assign(event)
            return []
        self._note(event.first, event.batch)
        return [SendBatch(self.default_worker, event.first, event.batch)]

    def host(self, device_type: str, device: int) -> str:
        """Name of the worker that hosts a logical device."""
        return self._hosts.get((device_type, device), self.default_worker)

    def story(self) -> str:
        """The last instructions, oldest first, one a line."""
        return "\n".join(line for entry in self._story for line in self._lines(entry))

    def _assign(self, event: DevicesAssigned) -> None:
        if event.worker != self.default_worker:
            raise InternalError(f"devices {event.ids} assigned to {event.worker!r}, but {self.default_worker!r} hosts all")
        self._hosts.update({(event.device_type, i): event.worker for i in event.ids})

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


def _title(instruction: Instruction) -> str:
    return f"  {type(instruction).__name__} {getattr(instruction, 'handle', '')}".rstrip()
