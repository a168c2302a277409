"""Steps of a compiled plan that run on one worker's pieces: each reads and writes slots, a list of pieces (or None) per slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.grid import Grid, Here, grid_of
from ..core.program import Apply, DefinePlan, Local
from .devices import default_generator
from .failing import StepFailed, describe
from .operators import resolve, schema
from .template import Template, slots_of

Slots = list[Any]
Run = Callable[[Slots, list[Any]], None]
DeviceOf = Callable[[str], torch.device]


def tensors_of(result: Any) -> list[Tensor]:
    """The tensor outputs of an operator, in order, lists flattened; a lone number counts as a 0-d tensor."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, list | tuple):
        return [t for item in result if isinstance(item, Tensor | list | tuple) for t in tensors_of(item)]
    return [] if result is None else [torch.tensor(result)]


def returns_tensors(step: Local) -> bool:
    """Whether the operator's result is exactly the step's outputs: one tensor, or a tuple of tensors without gaps."""
    returns = schema(resolve(step.operator)).returns
    return len(step.outputs) == len(returns) > 0 and all(str(r.type) == "Tensor" for r in returns)


def local_step(plan: DefinePlan, step: Local, here: Here, device_of: DeviceOf) -> Run:
    """Run one operator once per coordinate."""
    grid = Grid(plan.meshes[step.mesh], step.axes, here)
    used = list(dict.fromkeys(slots_of(step.args) + slots_of(step.kwargs)))
    index = {slot: grid.projection(grid_of(plan, slot, here)) for slot in used}
    count = len(grid.held)
    direct = {slot for slot in used if index[slot] == list(range(count))}
    template = Template(step, lambda slot: f"x{slot}[c]" if slot in direct else f"x{slot}[j{slot}[c]]", device_of, grid.held)
    template.namespace.update({f"j{slot}": index[slot] for slot in used})
    lines = ["def run(slots, s, results):"]
    lines += [f"    x{slot} = slots[{slot}]" for slot in used]
    lines += [f"    for c in range({count}):"]
    if count > 1 and torch.Tag.nondeterministic_seeded in resolve(step.operator).tags:
        template.namespace["rewind"] = rewinding(grid.mesh.device_type)
        lines += ["        rewind(c)"]
    lines += [f"        results.append({template.text})"]
    call = template.function("\n".join(lines), f"<plan for {step.operator}>")
    kept = {slot: _common(grid, grid_of(plan, slot, here)) for slot in step.outputs if plan.axes[slot] != grid.axes}
    one = step.outputs[0] if len(step.outputs) == 1 and returns_tensors(step) else None
    name = step.operator if step.operator == plan.operator else f"{step.operator} for {plan.operator}"

    def run(slots: Slots, scalars: list[Any]) -> None:
        results: list[Any] = []
        try:
            call(slots, scalars, results)
        except Exception as error:
            c = len(results)
            shapes = describe([slots[slot][index[slot][c]] for slot in used])
            raise StepFailed(name, grid.devices(c), shapes) from error
        if one is not None:
            slots[one] = results
        else:
            spread(step, results, slots)
        for slot, pieces in kept.items():
            slots[slot] = [slots[slot][i] for i in pieces]

    return run


def rewinding(device_type: str) -> Callable[[int], None]:
    """Called before each coordinate of a step that draws, with its number: all draw the same numbers."""
    state: list[Tensor] = []

    def rewind(number: int) -> None:
        generator = default_generator(device_type)
        if number == 0:
            state[:] = [generator.get_state()]
        else:
            generator.set_state(state[0])

    return rewind


def _common(grid: Grid, target: Grid) -> list[int]:
    """For each piece of an output that varies over fewer axes than its step: the first of the results that are alike."""
    firsts: dict[int, int] = {}
    for place, at in enumerate(grid.coords()):
        firsts.setdefault(target.number(at), place)
    return [firsts[piece] for piece in target.held]


def spread(step: Local, results: Sequence[Any], slots: Slots) -> None:
    """Put the outputs of several results, one per coordinate, in the step's output slots."""
    if not step.outputs:
        return
    rows = results if len(step.outputs) > 1 and returns_tensors(step) else [tensors_of(r) for r in results]
    for number, slot in enumerate(step.outputs):
        slots[slot] = [row[number] for row in rows]


def apply_step(plan: DefinePlan, step: Apply, here: Here) -> Run:
    """Run a function of the user's once per coordinate."""
    grid = Grid(plan.meshes[step.mesh], step.axes, here)
    index = {slot: grid.projection(grid_of(plan, slot, here)) for slot in step.inputs}
    kept = {slot: _common(grid, grid_of(plan, slot, here)) for slot in step.outputs}

    def run(slots: Slots, scalars: list[Any]) -> None:
        function, rows = slots[step.function][0], []
        for c in range(len(grid.held)):
            pieces = [slots[slot][index[slot][c]] for slot in step.inputs]
            try:
                rows.append(_results(function(*pieces), pieces, len(step.outputs)))
            except Exception as error:
                raise StepFailed(plan.operator, grid.devices(c), describe(pieces)) from error
        for number, slot in enumerate(step.outputs):
            slots[slot] = [rows[c][number] for c in kept[slot]]

    return run


def _results(results: Sequence[Any], pieces: Sequence[Tensor], count: int) -> list[Tensor]:
    """A function's results with memory of their own, in the order of the dims, as the client takes them to be."""
    if len(results) != count:
        raise ValueError(f"the function gave {len(results)} tensors on this piece, and {count} on others")
    held = {t.untyped_storage().data_ptr() for t in pieces}
    own = [t.detach().contiguous() for t in results]
    return [t.clone() if t.untyped_storage().data_ptr() in held else t for t in own]
