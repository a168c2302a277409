"""``Executor``: runs instructions in order, keeps failures for the next reply, and never stops at a failed operator."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ..communication.peers import NO_PEERS, Peers
from ..core.errors import InternalError
from ..core.grid import ALL_HERE, Grid, Here
from ..core.interrupts import Insisted
from ..core.program import (
    Barrier,
    Call,
    Calls,
    DefaultDtype,
    DefinePlan,
    Draw,
    Drop,
    Failure,
    Fetch,
    Forget,
    Free,
    Instruction,
    Load,
    Put,
    PutFunction,
    Reply,
    Shutdown,
)
from .compile import CompiledPlan
from .devices import Devices, default_generator, release_memory
from .failing import PeerRefused, Poisoned, StepFailed, told
from .files import filled
from .isolation import isolated
from .running import Place, Plans, beginning, run_calls, step
from .store import Poison, Store, settled
from .underway import Courier, Detached, Run


class Executor:
    """A worker's thread of control, without the thread: owns the store and the plans, and runs batches.

    ``Put`` hands tensors over: a tensor already on its device is stored as it is, not copied.

    Args:
        devices: where logical devices are.
        here: which of them this worker hosts.
        others: the session's other workers.
        failing: what an operator may raise that is a failure of it. In the client's process the rest is an interrupt of it.
    """

    def __init__(
        self,
        devices: Devices | None = None,
        here: Here = ALL_HERE,
        others: Peers = NO_PEERS,
        failing: type[BaseException] = Exception,
    ) -> None:
        self.devices = devices or Devices()
        self.here, self.others = here, others
        self._failing: type[BaseException] | tuple[()] = failing
        self.store = Store()
        self.courier = Courier() if others is not NO_PEERS else None
        self._plans: dict[int, CompiledPlan | Poison] = {}
        self._runs: Plans = {}
        self._failures: list[Failure] = []
        self._silent: list[tuple[int, int, int]] = []
        self._default_dtype = torch.float32
        self._at: tuple[Calls, Place] | None = None

    def submit(self, first: int, batch: list[Instruction]) -> None:
        """Run a batch whose first Call or Draw has sequence number ``first``; failures wait for the next reply."""
        with self._alone(batch):
            self._execute(first, batch)

    def run(self, first: int, batch: list[Instruction]) -> Reply:
        """Run a batch and answer its last instruction, with every failure since the last reply."""
        with self._alone(batch):
            result = self._execute(first, batch)
            self._settle()
        failures, self._failures = self._failures, []
        silent, self._silent = self._silent, []
        if isinstance(result, Poison):
            known = any(f is result.failure for f in failures)
            return Reply(None, failures if known else [*failures, result.failure], silent)
        return Reply(result, failures, silent)

    def doing(self) -> str:
        """The operator at hand, or the last one; from any thread."""
        at = self._at
        if at is None:
            return ""
        ahead = next(at[0].unpacked(at[1][1], at[1][2]), None)
        call = ahead or next(reversed(list(at[0].unpacked())))
        plan = self._plans.get(call.plan)
        return plan.plan.operator if isinstance(plan, CompiledPlan) else ""

    def disown(self) -> None:
        """In a forked child: whatever is raised ends it, for batches are the parent's to run."""
        self._failing = ()

    def close(self) -> None:
        """Release everything, once it is there."""
        if self.courier is not None:
            self.courier.close()
        self.store.clear()
        self._plans.clear()
        self._runs.clear()
        self.others.close()

    def _alone(self, batch: list[Instruction]) -> AbstractContextManager[None]:
        # A new default dtype is in force at once, lest a client in another thread see the old one.
        if batch and isinstance(batch[0], DefaultDtype):
            self._default_dtype = getattr(torch, batch[0].dtype)
        return isolated(lambda: self._default_dtype)

    def _execute(self, first: int, batch: list[Instruction]) -> Any:
        result, done, place, sequence = None, 0, beginning(), first
        try:
            with Insisted():
                for instruction in batch:
                    if type(instruction) is Calls:
                        self._run_calls(sequence, instruction, place)
                        calls = instruction.count
                    else:
                        result = self._other(sequence, instruction)
                        calls = int(type(instruction) is Draw)
                    # At one stroke, for an interrupt may come between calls.
                    done, sequence, place = done + 1, sequence + calls, beginning()
        except BaseException as interrupt:
            if self._failing:
                self._abandon(sequence, batch[done:], place, interrupt)
            raise
        return None if batch and type(batch[-1]) is Calls else result

    def _run_calls(self, sequence: int, calls: Calls, place: Place) -> None:
        """Run every call; one that fails poisons what it would have made."""
        self._at = calls, place
        while place[0] < calls.count:
            try:
                run_calls(calls, place, self._runs, self.store)
                return
            except Detached as detached:
                call = next(calls.unpacked(place[1], place[2]))
                self._begin(sequence + place[0], call, detached)
                step(place, call)
            except self._failing as error:
                call = next(calls.unpacked(place[1], place[2]))
                self._fail_call(sequence + place[0], call, error)
                step(place, call)

    def _begin(self, sequence: int, call: Call, detached: Detached) -> None:
        """Let a call run meanwhile."""
        assert self.courier is not None

        def fail(error: BaseException) -> Poison:
            known = next((v for v in map(settled, detached.sources) if isinstance(v, Poison)), None)
            return known or self._new_poison(sequence, call, error)

        self.courier.start(Run(detached, call.outputs, fail), self.store)

    def _settle(self) -> None:
        """Let everything be there, and every failure be known."""
        if self.courier is not None:
            self.courier.settle(self.store)

    def _other(self, sequence: int, instruction: Instruction) -> Any:
        """Any instruction but Calls; returns its answer."""
        handler = _HANDLERS[type(instruction)]
        if not isinstance(instruction, _MEANWHILE):
            self._settle()
        try:
            return handler(self, instruction)
        except self._failing as error:
            return self._fail(sequence, instruction, error)

    def _define(self, instruction: DefinePlan) -> None:
        plan = CompiledPlan(instruction, self.devices.device, self.here, self.others, self.courier)
        self._plans[instruction.plan] = plan
        self._runs[instruction.plan] = plan.run

    def _draw(self, instruction: Draw) -> Tensor | None:
        """Run a plan on the default generator, put in the given state and left as it was; answers the state after."""
        plan = self._plan(instruction)
        if instruction.state is None:
            plan.run(self.store, instruction)
            return None
        if not any(map(self.here.holds, plan.plan.meshes)):
            return None
        generator = default_generator(plan.device_type)
        before = generator.get_state()
        try:
            generator.set_state(_state(instruction.state))
            plan.run(self.store, instruction)
            return generator.get_state()
        finally:
            generator.set_state(before)

    def _plan(self, instruction: Draw) -> CompiledPlan:
        plan = self._plans.get(instruction.plan)
        if not isinstance(plan, CompiledPlan):
            raise InternalError(f"plan {instruction.plan} is not defined on this worker")
        return plan

    def _put(self, instruction: Put) -> None:
        device = self.devices.device(instruction.mesh.device_type)
        # An inference tensor could not be written outside inference mode, where workers run.
        tensors = [t.clone() if t.is_inference() else t for t in instruction.tensors]
        self.store[instruction.handle] = tuple(t.detach().to(device) for t in tensors)

    def _load(self, instruction: Load) -> None:
        self.store.update(filled(instruction, self.here, self.devices.device))

    def _put_function(self, instruction: PutFunction) -> None:
        function = instruction.function
        self.store[instruction.handle] = (pickle.loads(function) if isinstance(function, bytes) else function,)

    def _fetch(self, instruction: Fetch) -> Any:
        grid = Grid(instruction.mesh, instruction.axes, self.here)
        value = settled(self.store.get(instruction.handle)) if grid.held else ()
        if value is None:
            raise InternalError(f"value {instruction.handle} is not stored on this worker")
        if isinstance(value, Poison):
            return value
        answer: list[Any] = [None] * grid.count
        for piece, tensor in zip(grid.held, value, strict=True):
            if grid.holders[piece][0] == self.here.worker:
                answer[piece] = _description(tensor) if instruction.describe else tensor.detach().clone()
        return answer

    def _free(self, instruction: Free) -> None:
        self.store.free(instruction.handles)
        if instruction.release:
            release_memory()

    def _drop(self, instruction: Drop) -> None:
        self.store.drop(instruction.handles)

    def _forget(self, instruction: Forget) -> None:
        for number in instruction.plans:
            self._plans.pop(number, None)
            self._runs.pop(number, None)

    def _set_default_dtype(self, instruction: DefaultDtype) -> None:
        self._default_dtype = getattr(torch, instruction.dtype)
        torch.set_default_dtype(self._default_dtype)

    def _barrier(self, instruction: Barrier) -> None:
        pieces = (t for v in map(settled, self.store.values()) if not isinstance(v, Poison) for t in v if isinstance(t, Tensor))
        for device_type in {t.device.type for t in pieces} - {"cpu"}:
            torch.get_device_module(device_type).synchronize()

    def _shutdown(self, instruction: Shutdown) -> None:
        self.close()

    def _fail(self, sequence: int, instruction: Instruction, error: BaseException) -> Poison:
        """Poison what an instruction would have made or written; a new failure unless its cause is a poisoned input."""
        if isinstance(instruction, Draw):
            return self._fail_call(sequence, instruction, error)
        blame = StepFailed(getattr(instruction, "operator", type(instruction).__name__), _device_text(instruction), "none")
        poison = self._poison(sequence, getattr(instruction, "plan", -1), blame, error)
        if isinstance(instruction, Put):
            self.store[instruction.handle] = poison
        elif isinstance(instruction, Load):
            self.store.update({value.handle: poison for value in instruction.values})
        elif isinstance(instruction, DefinePlan):
            self._plans[instruction.plan] = poison
            self._runs.pop(instruction.plan, None)
        return poison

    def _fail_call(self, sequence: int, call: Call | Draw, error: BaseException) -> Poison:
        plan = self._plans.get(call.plan)
        poison = plan if isinstance(plan, Poison) else self.store.poison_of(call.inputs)
        if poison is None:
            poison = self._new_poison(sequence, call, error)
        else:
            self._silence(sequence, plan, poison.failure)
        for handle in call.outputs:
            self.store[handle] = poison
        if isinstance(plan, CompiledPlan) and plan.written:
            self._settle()
            for number in plan.written:
                self.store.spoil(call.inputs[number], poison)
        return poison

    def _silence(self, sequence: int, plan: Any, failure: Failure) -> None:
        """Remember why a call has nothing to give to other workers."""
        if isinstance(plan, CompiledPlan) and plan.meets:
            self._silent.append((sequence, failure.cause if failure.caused else self.here.worker, failure.sequence))

    def _new_poison(self, sequence: int, call: Call | Draw, error: BaseException) -> Poison:
        """Poison of a call that failed by itself."""
        plan = self._plans.get(call.plan)
        missing = [h for h in call.inputs if h not in self.store]
        if plan is None:
            error = InternalError(f"plan {call.plan} is not defined on this worker")
        elif missing and isinstance(error, KeyError | Poisoned):
            error = InternalError(f"values {missing} are not stored on this worker")
        unknown = StepFailed(type(call).__name__, "unknown", "unknown")
        blame = plan.blame(error, self.store, call) if isinstance(plan, CompiledPlan) else unknown
        return self._poison(sequence, call.plan, blame, error)

    def _poison(self, sequence: int, plan: int, blame: StepFailed, error: BaseException) -> Poison:
        """Record a new failure."""
        cause = error.__cause__ if isinstance(error, StepFailed) and error.__cause__ is not None else error
        message, text = told(cause)
        peer = cause.peer if isinstance(cause, PeerRefused) else -1
        failure = Failure(sequence, blame.operator, plan, blame.device, blame.shapes, message, text, peer)
        if failure.caused:
            self._silent.append((sequence, peer, sequence))
        else:
            self._failures.append(failure)
        return Poison(failure)

    def _abandon(self, sequence: int, rest: list[Instruction], place: Place, interrupt: BaseException) -> None:
        """After Ctrl-C, or what else a signal's handler raises: poison what the rest of a batch would compute.

        The books that later batches rely on are kept.

        The rest begins with the instruction that was interrupted, in a run of calls at a place. The user knows: only who
        reads such a value hears of it again.
        """
        known = len(self._failures)
        for instruction in rest:
            if isinstance(instruction, Calls):
                for number, call in enumerate(instruction.unpacked(place[1], place[2]), place[0]):
                    self._fail_call(sequence + number, call, interrupt)
                sequence += instruction.count
                place = beginning()
            elif isinstance(instruction, Draw):
                self._fail(sequence, instruction, interrupt)
                sequence += 1
            elif not isinstance(instruction, Fetch | Barrier):
                self._other(sequence, instruction)
        del self._failures[known:]


def _state(state: Any) -> Tensor:
    """A generator state as the byte tensor that PyTorch takes."""
    return state if isinstance(state, Tensor) else torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _description(tensor: Tensor) -> list[Any]:
    """Shape, stride and dtype."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise RuntimeError("the operator gives a tensor that is not dense, and no global tensor is")
    return [list(tensor.shape), list(tensor.stride()), str(tensor.dtype).removeprefix("torch.")]


def _device_text(instruction: Instruction) -> str:
    mesh = getattr(instruction, "mesh", None)
    return f"{mesh.device_type}:{','.join(map(str, mesh.ids))}" if mesh is not None else "unknown"


_MEANWHILE = (DefinePlan, Put, PutFunction, Load, Free, Forget)
"""What does not touch what may be under way."""

_HANDLERS: dict[type, Callable[[Executor, Any], Any]] = {
    DefinePlan: Executor._define,
    Draw: Executor._draw,
    Put: Executor._put,
    Load: Executor._load,
    PutFunction: Executor._put_function,
    Fetch: Executor._fetch,
    Free: Executor._free,
    Drop: Executor._drop,
    Forget: Executor._forget,
    DefaultDtype: Executor._set_default_dtype,
    Barrier: Executor._barrier,
    Shutdown: Executor._shutdown,
}
