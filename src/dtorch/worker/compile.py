"""Plans made ready to run: everything that can be settled once is settled here, so that a Call only runs operators.

Almost every Call is one operator on values of one piece. Such a plan becomes one generated function that looks up its
inputs, runs the operator and stores the result; on a Poison among the inputs it fails, since poison has no pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..core.errors import InternalError
from ..core.program import Apply, Call, Collective, DefinePlan, Draw, Local, Step, Together
from .operators import resolve, schema
from .steps import (
    DeviceOf,
    Grid,
    Run,
    StepFailed,
    apply_step,
    collective_step,
    describe,
    exchange_step,
    grid_of,
    local_step,
    returns_tensors,
    tensors_of,
    together_step,
)
from .store import Poison, Store
from .template import Template, slots_of, varies


class Poisoned(Exception):
    """An input of a plan is poison."""


class CompiledPlan:
    """A plan ready to run.

    Attributes:
        run: takes inputs from the store and puts outputs there, or raises.
        written: numbers of the inputs that the plan writes in place.
        device_type: of its first mesh.
    """

    def __init__(self, plan: DefinePlan, device_of: DeviceOf) -> None:
        self.plan = plan
        self.device_type = plan.meshes[0].device_type if plan.meshes else "cpu"
        self.written = written_inputs(plan)
        self.run: Callable[[Store, Any], None] = _single(plan, device_of) if _is_single(plan) else _general(plan, device_of)

    def blame(self, error: BaseException, store: Store, call: Call | Draw) -> StepFailed:
        """Where and on what a run failed."""
        if isinstance(error, StepFailed):
            return error
        tensors = [t for h in call.inputs for t in _stored(store, h)]
        step = self.plan.steps[0] if self.plan.steps else None
        operator = step.operator if isinstance(step, Local) else self.plan.operator
        device = Grid(self.plan.meshes[0], []).devices(0) if self.plan.meshes else self.device_type
        return StepFailed(operator, device, describe(tensors))


def _stored(store: Store, handle: int) -> Sequence[Tensor]:
    value = store.get(handle, ())
    return () if isinstance(value, Poison) else value


def _is_single(plan: DefinePlan) -> bool:
    """Whether the plan is one operator on values of one piece."""
    step = plan.steps[0] if len(plan.steps) == 1 else None
    return isinstance(step, Local) and not step.axes and not any(plan.axes) and not varies([step.args, step.kwargs])


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


def _general(plan: DefinePlan, device_of: DeviceOf) -> Callable[[Store, Any], None]:
    """Run step by step, and let go of every temporary after its last use."""
    steps = list(zip([_runner(plan, step, device_of) for step in plan.steps], _last_uses(plan), strict=True))
    empty = [None] * (len(plan.axes) - plan.inputs)

    def run(store: Store, call: Any) -> None:
        slots: list[Any] = [store[h] for h in call.inputs]
        if any(type(value) is Poison for value in slots):
            raise Poisoned
        slots += empty
        scalars = call.scalars
        for step, dead in steps:
            step(slots, scalars)
            for slot in dead:
                slots[slot] = None
        for handle, slot in zip(call.outputs, plan.outputs, strict=True):
            store[handle] = slots[slot]

    return run


def _runner(plan: DefinePlan, step: Step, device_of: DeviceOf) -> Run:
    if isinstance(step, Local):
        return local_step(plan, step, device_of)
    if isinstance(step, Apply):
        return apply_step(plan, step)
    if isinstance(step, Together):
        return together_step(plan, step)
    return collective_step(plan, step) if isinstance(step, Collective) else exchange_step(plan, step, device_of)


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


def written_inputs(plan: DefinePlan) -> tuple[int, ...]:
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
                _check_written(plan, step, slots)
                written.update(root[s] for s in slots if s in root)
            root.update({out: root[s] for s in slots if s in root for out in step.outputs})
    return tuple(sorted(written))


def _check_written(plan: DefinePlan, step: Local, slots: list[int]) -> None:
    grid = Grid(plan.meshes[step.mesh], step.axes)
    for slot in slots:
        if grid.projection(grid_of(plan, slot)) != list(range(len(grid.places))):
            varied = f"it varies over axes {plan.axes[slot]}, the step over {step.axes}"
            raise InternalError(f"{step.operator} in a plan for {plan.operator} writes slot {slot} more than once: {varied}")
