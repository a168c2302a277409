"""Plans made ready to run: everything that can be settled once is settled here, so that a Call only runs operators.

Almost every Call is one operator on values of one piece. Such a plan becomes one generated function that looks up its
inputs, runs the operator and stores the result; on a Poison among the inputs it fails, since poison has no pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
from torch import Tensor

from ..communication.peers import NO_PEERS, Peers
from ..core.errors import InternalError
from ..core.grid import ALL_HERE, Grid, Here, grid_of
from ..core.program import Apply, Call, Collective, DefinePlan, Draw, Exchange, Local, Step, Together
from .collectives import CollectiveStep, CutStep
from .exchanging import ExchangeStep
from .failing import Poisoned, StepFailed, describe
from .operators import resolve, schema
from .steps import DeviceOf, Run, apply_step, local_step, returns_tensors, tensors_of
from .store import Pieces, Poison, Store, settled
from .template import Template, chosen, slots_of
from .underway import LATER_NBYTES, Courier, Detached, nbytes

CUTS = ("slice", "fill")
"""Kinds of collectives that need no communication."""


class CompiledPlan:
    """A plan ready to run.

    Args:
        courier: runs plans that only move something between workers, where there are others.

    Attributes:
        run: takes inputs from the store and puts outputs there, or raises.
        written: numbers of the inputs that the plan writes in place.
        meets: whether it may have to do with other workers.
        device_type: of its first mesh.
    """

    def __init__(
        self,
        plan: DefinePlan,
        device_of: DeviceOf,
        here: Here = ALL_HERE,
        others: Peers = NO_PEERS,
        courier: Courier | None = None,
    ) -> None:
        self.plan, self.here = plan, here
        self.device_type = plan.meshes[0].device_type if plan.meshes else "cpu"
        self.written = written_inputs(plan, here)
        self.meets = here.hosting.workers > 1 and any(isinstance(s, Collective | Exchange | Together) for s in plan.steps)
        self.run: Callable[[Store, Any], None]
        if not any(here.holds(mesh) for mesh in plan.meshes):
            self.run = _nothing
        elif _is_single(plan, here):
            self.run = _single(_for_one(plan, here), device_of)
        else:
            self.run = _general(plan, here, others, device_of, courier)
        # A function may write whatever it is given.
        may_write = range(plan.inputs) if any(isinstance(s, Apply) for s in plan.steps) else self.written
        if may_write and courier is not None:
            self.run = _guarded(self.run, may_write, courier)

    def blame(self, error: BaseException, store: Store, call: Call | Draw) -> StepFailed:
        """Where and on what a run failed."""
        if isinstance(error, StepFailed):
            return error
        tensors = [t for h in call.inputs for t in _stored(store, h)]
        step = self.plan.steps[0] if self.plan.steps else None
        operator = step.operator if isinstance(step, Local) else self.plan.operator
        held = any(map(self.here.holds, self.plan.meshes[:1]))
        device = Grid(self.plan.meshes[0], [], self.here).devices(0) if held else self.device_type
        return StepFailed(operator, device, describe(tensors))


def _stored(store: Store, handle: int) -> Sequence[Tensor]:
    value = settled(store.get(handle, ()))
    return () if isinstance(value, Poison) else value


def _nothing(store: Store, call: Any) -> None:
    """A plan for devices of other workers."""


def _is_single(plan: DefinePlan, here: Here) -> bool:
    """Whether the plan is one operator on values of which this worker holds one piece each."""
    step = plan.steps[0] if len(plan.steps) == 1 else None
    if not isinstance(step, Local):
        return False
    if not step.axes and not any(plan.axes):
        return True
    grids = [Grid(plan.meshes[step.mesh], step.axes, here), *(grid_of(plan, slot, here) for slot in range(len(plan.axes)))]
    return all(len(grid.held) == 1 for grid in grids)


def _for_one(plan: DefinePlan, here: Here) -> DefinePlan:
    """A plan of one operator with the arguments for the only coordinate that it runs for here."""
    step = plan.steps[0]
    assert isinstance(step, Local)
    (number,) = Grid(plan.meshes[step.mesh], step.axes, here).held if step.axes else (0,)
    step = msgspec.structs.replace(step, args=chosen(step.args, number), kwargs=chosen(step.kwargs, number))
    return msgspec.structs.replace(plan, steps=[step])


def _single(plan: DefinePlan, device_of: DeviceOf) -> Callable[[Store, Any], None]:
    """One function for a plan of one operator on values of one piece: in C where it makes one tensor, else generated."""
    step = plan.steps[0]
    assert isinstance(step, Local)
    template = Template(step, lambda slot: f"store[i[{slot}]][0]", device_of)
    exact = returns_tensors(step)
    alone = exact and plan.outputs == step.outputs and len(step.outputs) == 1
    compiled = template.compiled() if alone else None
    if compiled is not None:
        return compiled
    template.namespace["tensors_of"] = tensors_of
    lines = ["def run(store, call):", "    i = call.inputs"]
    lines += ["    s = call.scalars"] if "s[" in template.text else []
    if alone:
        lines.append(f"    store[call.outputs[0]] = ({template.text},)")
        return template.function("\n".join(lines), f"<plan for {plan.operator}>")
    fresh = any(slot >= plan.inputs for slot in plan.outputs)
    result = template.text if exact and len(step.outputs) > 1 else f"tensors_of({template.text})"
    lines.append(f"    r = {result}" if fresh else f"    {template.text}")
    lines += ["    o = call.outputs"] if plan.outputs else []
    for number, slot in enumerate(plan.outputs):
        value = f"store[i[{slot}]]" if slot < plan.inputs else f"(r[{step.outputs.index(slot)}],)"
        lines.append(f"    store[o[{number}]] = {value}")
    return template.function("\n".join(lines), f"<plan for {plan.operator}>")


def _general(
    plan: DefinePlan, here: Here, others: Peers, device_of: DeviceOf, courier: Courier | None
) -> Callable[[Store, Any], None]:
    """Run step by step, and let go of every temporary after its last use."""
    plan = msgspec.structs.replace(plan, steps=[one for step in plan.steps for one in _apart(step)])
    runs = [_runner(plan, step, here, others, device_of) for step in plan.steps]
    meets = any(isinstance(run, CollectiveStep | ExchangeStep) and run.peers for run in runs)
    work = _working(plan, runs)
    # What only moves can move meanwhile.
    moves = meets and not written_inputs(plan, here) and not any(isinstance(s, Local | Apply) for s in plan.steps)
    absent = {slot for slot in range(plan.inputs) if not grid_of(plan, slot, here).held}

    def run(store: Store, call: Any) -> None:
        values: list[Any] = [() if n in absent else store.get(h) for n, h in enumerate(call.inputs)]
        if courier is not None and meets:
            if moves and nbytes(values) >= LATER_NBYTES:
                raise Detached(partial(work, values, call.scalars), values)
            # All workers come to their meetings in one order.
            courier.drain()
        for handle, pieces in zip(call.outputs, work(values, call.scalars), strict=True):
            store[handle] = pieces

    return run


def _working(plan: DefinePlan, runs: Sequence[Run]) -> Callable[[Sequence[Any], list[Any]], list[Pieces]]:
    """Makes the outputs of the inputs.

    A failure must not keep other workers waiting: what they need this one for after it, it refuses.
    """
    steps = list(zip(runs, _last_uses(plan), strict=True))
    empty = [None] * (len(plan.axes) - plan.inputs)

    def work(values: Sequence[Any], scalars: list[Any]) -> list[Pieces]:
        done = 0
        try:
            slots: list[Any] = [settled(value) for value in values]
            if any(value is None or type(value) is Poison for value in slots):
                raise Poisoned
            slots += empty
            for step, dead in steps:
                # A step that fails has told its peers.
                done += 1
                step(slots, scalars)
                for slot in dead:
                    slots[slot] = None
        except BaseException:
            for later in runs[done:]:
                if isinstance(later, CollectiveStep | ExchangeStep):
                    later.refuse()
            raise
        return [slots[slot] for slot in plan.outputs]

    return work


def _guarded(run: Callable[[Store, Any], None], written: Sequence[int], courier: Courier) -> Callable[[Store, Any], None]:
    """A plan that writes its inputs, when nothing reads them any more."""

    def guarded(store: Store, call: Any) -> None:
        if courier.busy:
            values = [settled(store.get(call.inputs[number], ())) for number in written]
            courier.release(t for value in values if not isinstance(value, Poison) for t in value)
        run(store, call)

    return guarded


def _apart(step: Step) -> Sequence[Step]:
    """Steps that are one, where nothing travels that could travel together."""
    return step.parts if isinstance(step, Together) and step.parts[0].kind in CUTS else [step]


def _runner(plan: DefinePlan, step: Step, here: Here, others: Peers, device_of: DeviceOf) -> Run:
    if isinstance(step, Local):
        return local_step(plan, step, here, device_of)
    if isinstance(step, Apply):
        return apply_step(plan, step, here)
    if isinstance(step, Collective):
        return CutStep(plan, step, here) if step.kind in CUTS else CollectiveStep(plan, step, here, others)
    if isinstance(step, Together):
        return CollectiveStep(plan, step, here, others)
    return ExchangeStep(plan, step, here, others, device_of(plan.meshes[step.target_mesh].device_type))


def _reads(step: Step) -> list[int]:
    if isinstance(step, Apply):
        return [step.function, *step.inputs]
    if isinstance(step, Together):
        return [part.source for part in step.parts]
    return slots_of([step.args, step.kwargs]) if isinstance(step, Local) else [step.source]


def _makes(step: Step) -> list[int]:
    if isinstance(step, Together):
        return [part.output for part in step.parts]
    return step.outputs if isinstance(step, Local | Apply) else [step.output]


def _last_uses(plan: DefinePlan) -> list[list[int]]:
    """For each step, the slots that nothing after it needs."""
    needed, dead = set(plan.outputs), []
    for step in reversed(plan.steps):
        touched = set(_reads(step)) | set(_makes(step))
        dead.append(sorted(touched - needed))
        needed |= touched
    return dead[::-1]


def written_inputs(plan: DefinePlan, here: Here = ALL_HERE) -> tuple[int, ...]:
    """Numbers of the inputs that a plan writes in place, directly or through a view made inside the plan.

    Raises:
        InternalError: a step would write one shared piece several times, once per coordinate.
    """
    root = {slot: slot for slot in range(plan.inputs)}
    written: set[int] = set()
    for step in plan.steps:
        if not isinstance(step, Local):
            written.update(slot for slot in _makes(step) if slot < plan.inputs)
            continue
        arguments = schema(resolve(step.operator)).arguments
        named = dict(zip([a.name for a in arguments], step.args, strict=False)) | step.kwargs
        for argument in arguments:
            if argument.alias_info is None or argument.name not in named:
                continue
            slots = slots_of([named[argument.name]])
            if argument.alias_info.is_write:
                _check_written(plan, step, slots, here)
                written.update(root[s] for s in slots if s in root)
            root.update({out: root[s] for s in slots if s in root for out in step.outputs})
    return tuple(sorted(written))


def _check_written(plan: DefinePlan, step: Local, slots: list[int], here: Here) -> None:
    grid = Grid(plan.meshes[step.mesh], step.axes, here)
    for slot in slots:
        if grid.projection(grid_of(plan, slot, here)) != list(range(len(grid.held))):
            varied = f"it varies over axes {plan.axes[slot]}, the step over {step.axes}"
            raise InternalError(f"{step.operator} in a plan for {plan.operator} writes slot {slot} more than once: {varied}")
