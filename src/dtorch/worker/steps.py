"""Steps of a compiled plan: each reads and writes slots, a list of pieces (or None) per slot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..communication import local as comm
from ..core.mesh import coordinates
from ..core.program import Apply, Collective, DefinePlan, Exchange, Local, MeshInfo, Together
from .devices import default_generator
from .operators import resolve, schema
from .store import Pieces
from .template import Template, slots_of

Slots = list[Any]
Run = Callable[[Slots, list[Any]], None]
DeviceOf = Callable[[str], torch.device]
Cut = tuple[int, int, int]

JOIN_ABOVE = 8
"""Pieces of a line beyond which ``all_to_all`` joins it."""


class StepFailed(Exception):
    """A step of a plan raised.

    Attributes:
        operator: the local operator, or the collective and the operator that needs it.
        device: logical device ids that the failing piece belongs to, with the device type.
        shapes: local shapes and dtypes of the tensors it worked on.
    """

    def __init__(self, operator: str, device: str, shapes: str) -> None:
        super().__init__(operator, device, shapes)
        self.operator, self.device, self.shapes = operator, device, shapes


class Grid:
    """Pieces along some axes of a mesh, numbered row-major."""

    def __init__(self, mesh: MeshInfo, axes: Sequence[int]) -> None:
        self.mesh = mesh
        self.axes = list(axes)
        self.places = list(coordinates([mesh.shape[a] for a in axes]))

    def number(self, at: dict[int, int]) -> int:
        """The piece at a coordinate given by axis; axes that are not given count as 0."""
        index = 0
        for axis in self.axes:
            index = index * self.mesh.shape[axis] + at.get(axis, 0)
        return index

    def coords(self) -> Iterator[dict[int, int]]:
        """Each piece's coordinate, by axis."""
        return (dict(zip(self.axes, place, strict=True)) for place in self.places)

    def projection(self, other: Grid) -> list[int]:
        """For each piece of this grid, the number of the piece of another grid at the same place."""
        return [other.number(at) for at in self.coords()]

    def devices(self, piece: int) -> str:
        """Logical ids that hold a piece, e.g. ``cpu:1,5``."""
        place = self.places[piece]
        whole = zip(self.mesh.ids, coordinates(self.mesh.shape), strict=True)
        ids = [i for i, c in whole if tuple(c[a] for a in self.axes) == place]
        text = ",".join(map(str, ids[:8]))
        return f"{self.mesh.device_type}:{text}{',...' if len(ids) > 8 else ''}"


def grid_of(plan: DefinePlan, slot: int) -> Grid:
    """The pieces of a slot."""
    return Grid(plan.meshes[plan.meshes_of[slot]], plan.axes[slot])


def describe(tensors: Sequence[Any]) -> str:
    """Shapes and dtypes, for error texts."""
    shown = [f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors if isinstance(t, Tensor)]
    return ", ".join(shown) or "none"


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


def local_step(plan: DefinePlan, step: Local, device_of: DeviceOf) -> Run:
    """Run one operator once per coordinate."""
    grid = Grid(plan.meshes[step.mesh], step.axes)
    used = list(dict.fromkeys(slots_of(step.args) + slots_of(step.kwargs)))
    index = {slot: grid.projection(grid_of(plan, slot)) for slot in used}
    count = len(grid.places)
    direct = {slot for slot in used if index[slot] == list(range(count))}
    template = Template(step, lambda slot: f"x{slot}[c]" if slot in direct else f"x{slot}[j{slot}[c]]", device_of)
    template.namespace.update({f"j{slot}": index[slot] for slot in used})
    lines = ["def run(slots, s, results):"]
    lines += [f"    x{slot} = slots[{slot}]" for slot in used]
    lines += [f"    for c in range({count}):"]
    if count > 1 and torch.Tag.nondeterministic_seeded in resolve(step.operator).tags:
        template.namespace["rewind"] = rewinding(grid.mesh.device_type)
        lines += ["        rewind(c)"]
    lines += [f"        results.append({template.text})"]
    call = template.function("\n".join(lines), f"<plan for {step.operator}>")
    kept = {slot: _common(grid, grid_of(plan, slot)) for slot in step.outputs if plan.axes[slot] != grid.axes}
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
    return [grid.number(at) for at in target.coords()]


def spread(step: Local, results: Sequence[Any], slots: Slots) -> None:
    """Put the outputs of several results, one per coordinate, in the step's output slots."""
    if not step.outputs:
        return
    rows = results if len(step.outputs) > 1 and returns_tensors(step) else [tensors_of(r) for r in results]
    for number, slot in enumerate(step.outputs):
        slots[slot] = [row[number] for row in rows]


def collective_step(plan: DefinePlan, step: Collective) -> Run:
    """Combine or cut the pieces of one slot along a mesh axis."""
    source, target = grid_of(plan, step.source), grid_of(plan, step.output)
    lines = _lines(step, source, target)
    cuts = [_cut(step, source.mesh, at) for at in target.coords()]
    made = _joined_once if step.kind == "all_to_all" and len(lines[0]) > JOIN_ABOVE else _one_by_one

    def run(slots: Slots, scalars: list[Any]) -> None:
        pieces, results = slots[step.source], []
        try:
            for piece in _refilled(step, pieces, lines, slots[step.output]) if step.refill else made(step, pieces, lines, cuts):
                results.append(piece)
        except Exception as error:
            c = len(results)
            name = f"{step.kind} for {plan.operator}"
            raise StepFailed(name, target.devices(c), describe([pieces[i] for i in lines[c]])) from error
        slots[step.output] = results

    return run


def together_step(plan: DefinePlan, step: Together) -> Run:
    """Several collectives, one after the other: in one process nothing is saved by sending them as one."""
    runs = [collective_step(plan, part) for part in step.parts]

    def run(slots: Slots, scalars: list[Any]) -> None:
        for part in runs:
            part(slots, scalars)

    return run


def _one_by_one(step: Collective, pieces: Pieces, lines: list[list[int]], cuts: list[Cut]) -> Iterator[Tensor]:
    make = _MAKERS[step.kind]
    for line, cut in zip(lines, cuts, strict=True):
        yield make(step, [pieces[i] for i in line], *cut)


def _refilled(step: Collective, pieces: Pieces, lines: list[list[int]], held: Pieces) -> Iterator[Tensor]:
    """``all_gather`` into memory that is there."""
    for line, into in zip(lines, held, strict=True):
        yield comm.all_gather([pieces[i] for i in line], step.dim, step.order, into)


def _joined_once(step: Collective, pieces: Pieces, lines: list[list[int]], cuts: list[Cut]) -> Iterator[Tensor]:
    """``all_to_all`` of long lines: each is joined once for all its targets, which spares k * k small copies."""
    joined: dict[int, Tensor] = {}
    for line, (_, start, size) in zip(lines, cuts, strict=True):
        if line[0] not in joined:
            joined[line[0]] = comm.all_gather([pieces[i] for i in line], step.from_dim, step.order)
        yield comm.keep(joined[line[0]], step.dim, start, size)


def _lines(step: Collective, source: Grid, target: Grid) -> list[list[int]]:
    """For each target piece, the source pieces it is made from: those along the axis, or the one at its place."""
    k = source.mesh.shape[step.axis]
    if step.kind in ("slice", "fill"):
        return [[i] for i in target.projection(source)]
    stride = source.number({step.axis: 1})
    firsts = [source.number({**at, step.axis: 0}) for at in target.coords()]
    whole = {first: [first + i * stride for i in range(k)] for first in dict.fromkeys(firsts)}
    return [whole[first] for first in firsts]


def _cut(step: Collective, mesh: MeshInfo, at: dict[int, int]) -> Cut:
    """(coordinate along the axis, start, size) of a target piece within what the outer sharding axes left."""
    k, here, outer = mesh.shape[step.axis], at.get(step.axis, 0), 0
    if not step.sizes:
        return here, 0, 0
    for axis in step.outer:
        outer = outer * mesh.shape[axis] + at.get(axis, 0)
    sizes = step.sizes[outer * k : (outer + 1) * k]
    return here, sum(sizes[:here]), sizes[here]


def _gather(step: Collective, line: Pieces, here: int, start: int, size: int) -> Tensor:
    return comm.all_gather(line, step.dim, step.order)


def _reduce(step: Collective, line: Pieces, here: int, start: int, size: int) -> Tensor:
    return comm.all_reduce(line, step.op)


def _reduce_scatter(step: Collective, line: Pieces, here: int, start: int, size: int) -> Tensor:
    return comm.reduce_scatter(line, step.op, step.dim, start, size)


def _all_to_all(step: Collective, line: Pieces, here: int, start: int, size: int) -> Tensor:
    return comm.all_to_all(line, step.from_dim, step.dim, start, size, step.order)


def _slice(step: Collective, line: Pieces, here: int, start: int, size: int) -> Tensor:
    return comm.keep(line[0], step.dim, start, size)


def _fill(step: Collective, line: Pieces, here: int, start: int, size: int) -> Tensor:
    return comm.fill(line[0], step.op, first=here == 0)


def apply_step(plan: DefinePlan, step: Apply) -> Run:
    """Run a function of the user's once per coordinate."""
    grid = Grid(plan.meshes[step.mesh], step.axes)
    index = {slot: grid.projection(grid_of(plan, slot)) for slot in step.inputs}
    kept = {slot: _common(grid, grid_of(plan, slot)) for slot in step.outputs}

    def run(slots: Slots, scalars: list[Any]) -> None:
        function, rows = slots[step.function][0], []
        for c in range(len(grid.places)):
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


def exchange_step(plan: DefinePlan, step: Exchange, device_of: DeviceOf) -> Run:
    """Assemble each target piece from parts of source pieces."""
    target = grid_of(plan, step.output)
    device = device_of(target.mesh.device_type)

    def run(slots: Slots, scalars: list[Any]) -> None:
        pieces, results = slots[step.source], []
        try:
            for parts, shape in zip(step.parts, step.shapes, strict=True):
                results.append(comm.assemble(pieces, parts, shape, device, step.order))
        except Exception as error:
            c = len(results)
            name = f"exchange for {plan.operator}"
            raise StepFailed(name, target.devices(c), describe([pieces[p[0]] for p in step.parts[c]])) from error
        slots[step.output] = results

    return run


_MAKERS: dict[str, Callable[[Collective, Pieces, int, int, int], Tensor]] = {
    "all_gather": _gather,
    "all_reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "slice": _slice,
    "fill": _fill,
}
