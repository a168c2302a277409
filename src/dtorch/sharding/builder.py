"""``Builder``: writes a plan step by step, keeping the spec of every value on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch._ops import OpOverload

from ..core.mesh import DeviceMesh, coordinates
from ..core.placements import Shard
from ..core.program import Collective, Const, DefinePlan, Exchange, Local, MeshInfo, Scalar, Slot, Step, Vary
from ..core.spec import Spec
from .call import operator_name, replace_leaves
from .plan import Comm

PlanInto = Callable[["Builder", OpOverload, tuple, dict[str, Any]], tuple[list["Value"], Any]]


@dataclass(frozen=True, slots=True)
class Value:
    """A value inside a plan under construction: where it is and what it is."""

    slot: int
    spec: Spec


@dataclass(frozen=True, slots=True)
class Varying:
    """A local argument that depends on the mesh coordinate: ``fn(coord)``, the whole coordinate given."""

    fn: Callable[[tuple[int, ...]], Any]


class Changing:
    """A number that comes with each call: its value now, for shape inference, and its place in the call."""

    __slots__ = ("index", "value")

    def __init__(self, value: Any, index: int) -> None:
        self.value, self.index = value, index


class Builder:
    """A plan under construction.

    Args:
        operator: name for reports and errors.
        inputs: specs of the plan's inputs.
        plan_into: the planner's entry for nested operators; given, not imported, since the planner stands above.
    """

    def __init__(self, operator: str, inputs: Sequence[Spec], plan_into: PlanInto) -> None:
        self.operator = operator
        self.plan_into = plan_into
        self.meshes: list[DeviceMesh] = []
        self.home: DeviceMesh | None = None
        self.steps: list[Step] = []
        self.comms: list[Comm] = []
        # Numbers of the steps that each of the comms, in order, tells of.
        self.moving: set[int] = set()
        self.axes: list[list[int]] = []
        self.meshes_of: list[int] = []
        self.programmed = False
        self.replicated = False
        self.random = False
        self.inputs = tuple(Value(self.new_slot(spec), spec) for spec in inputs)

    def new_slot(self, spec: Spec) -> int:
        """Allot a slot for a value of this spec."""
        self.axes.append(list(spec.axes))
        self.meshes_of.append(self.mesh_number(spec.mesh))
        return len(self.axes) - 1

    def op(self, func: OpOverload, *args: Any, **kwargs: Any) -> Any:
        """Plan a whole operator on values, by its own rules; returns its output value, or a list where it has several."""
        outs, _ = self.plan_into(self, func, args, kwargs)
        return outs[0] if len(outs) == 1 else outs

    def mesh_number(self, mesh: DeviceMesh) -> int:
        """Number of a mesh within the plan."""
        if mesh not in self.meshes:
            self.meshes.append(mesh)
        return self.meshes.index(mesh)

    def local(
        self,
        func: OpOverload | str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        outs: Sequence[Spec | None],
        mesh: DeviceMesh | None = None,
    ) -> list[Value]:
        """Run an operator on local pieces, once per coordinate over every axis on which an argument or output varies.

        ``args`` may hold ``Value`` and ``Varying``. The caller vouches that the local results have the specs ``outs``;
        along an axis on which an output does not vary, they are alike. A None among ``outs`` is a result to drop.
        """
        values = _values((args, kwargs))
        varying = _contains((args, kwargs), Varying)
        kept = [spec for spec in outs if spec is not None]
        home = mesh or (values[0].spec.mesh if values else kept[0].mesh)
        axes = sorted(
            {a for v in values for a in v.spec.axes} | ({a for o in kept for a in o.axes} if varying or not values else set())
        )
        assert all(set(spec.axes) <= set(axes) for spec in kept), f"{func}: outputs {kept} vary beyond axes {axes}"
        slots = [self.unknown_slot(axes, home) if spec is None else self.new_slot(spec) for spec in outs]
        coords = [_whole(home.ndim, axes, c) for c in coordinates([home.shape[a] for a in axes])] if varying else []
        written = replace_leaves((list(args), kwargs), Varying, lambda v: _vary([literal(v.fn(c)) for c in coords]))
        written = _literals(replace_leaves(written, Value, lambda v: Slot(v.slot)))
        name = func if isinstance(func, str) else operator_name(func)
        self.steps.append(Local(name, written[0], written[1], slots, axes, self.mesh_number(home)))
        return [Value(slot, spec) for slot, spec in zip(slots, outs, strict=True) if spec is not None]

    def unknown_slot(self, axes: list[int], mesh: DeviceMesh) -> int:
        """Allot a slot for a result of which only the axes it varies over are known."""
        self.axes.append(axes)
        self.meshes_of.append(self.mesh_number(mesh))
        return len(self.axes) - 1

    def collective(
        self,
        kind: str,
        value: Value,
        target: Spec,
        axis: int,
        dim: int = 0,
        sizes: Sequence[int] = (),
        op: str = "sum",
        nbytes: float = 0,
        from_dim: int = 0,
    ) -> Value:
        """Combine pieces along one axis; ``nbytes`` counts for the report, 0 where nothing moves."""
        out = Value(self.new_slot(target), target)
        outer = [a for a in target.sharding_axes(dim) if a < axis] if isinstance(target.placements[axis], Shard) else []
        mesh, order, now = self.meshes_of[value.slot], list(target.order), value.spec.placements[axis]
        step = Collective(kind, value.slot, out.slot, axis, dim, list(sizes), op, mesh, outer, order, from_dim)
        if isinstance(now, Shard):
            before = [a for a in value.spec.sharding_axes(now.dim) if a < axis]
            step = msgspec.structs.replace(step, from_sizes=list(value.spec.sizes_on(axis)), from_outer=before)
        self.steps.append(step)
        if nbytes:
            self.report(kind, target.mesh.axis_names()[axis], nbytes, value.spec, target)
        return out

    def exchange(self, value: Value, target: Spec, parts: list, shapes: list, kind: str, axis: str, nbytes: float) -> Value:
        """Assemble target pieces from parts of source pieces, point to point."""
        out = Value(self.new_slot(target), target)
        self.steps.append(
            Exchange(
                value.slot,
                out.slot,
                parts,
                shapes,
                self.meshes_of[value.slot],
                self.meshes_of[out.slot],
                str(target.dtype).removeprefix("torch."),
                list(target.order),
            )
        )
        if nbytes:
            self.report(kind, axis, nbytes, value.spec, target)
        return out

    def report(self, kind: str, axis: str, nbytes: float, source: Spec, target: Spec) -> None:
        """Note the collective that was appended last, for ``explain()`` and ``communication()``."""
        self.moving.add(len(self.steps) - 1)
        self.comms.append(
            Comm(kind, axis, int(nbytes), str(list(source.placements)), str(list(target.placements)), self.operator)
        )

    def define(self, outputs: Sequence[Value]) -> DefinePlan:
        """The finished definition, numbered 0: the client allots the number."""
        meshes = [MeshInfo(m.device_type, list(m.shape), list(m.ids)) for m in self.meshes]
        return DefinePlan(
            0,
            self.operator,
            meshes,
            self.axes,
            self.meshes_of,
            len(self.inputs),
            self.steps,
            [v.slot for v in outputs],
            self.random,
        )


def literal(value: Any) -> Any:
    """A non-tensor argument in the form that crosses the wire."""
    if value is None or isinstance(value, bool | int | float | str | Slot | Scalar | Vary | Const):
        return value
    if isinstance(value, Changing):
        return Scalar(value.index)
    if isinstance(value, list | tuple):
        return [literal(v) for v in value]
    if isinstance(value, torch.dtype):
        return Const("dtype", str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return Const("device", value.type)
    if isinstance(value, torch.layout | torch.memory_format):
        return Const("torch", str(value).removeprefix("torch."))
    if isinstance(value, complex):
        return Const("complex", str(value))
    raise TypeError(f"{value!r} of type {type(value).__name__} cannot be sent to a worker")


def _literals(tree: Any) -> Any:
    args, kwargs = tree
    return [literal(a) for a in args], {k: literal(v) for k, v in kwargs.items()}


def _vary(values: list[Any]) -> Any:
    """The one value where all are equal, else a ``Vary``."""
    return values[0] if all(v == values[0] for v in values) else Vary(values)


def _values(tree: Any) -> list[Value]:
    found: list[Value] = []
    replace_leaves(tree, Value, found.append)
    return found


def _contains(tree: Any, kind: type) -> bool:
    found: list[Any] = []
    replace_leaves(tree, kind, found.append)
    return bool(found)


def _whole(ndim: int, axes: Sequence[int], at: Sequence[int]) -> tuple[int, ...]:
    coord = [0] * ndim
    for a, c in zip(axes, at, strict=True):
        coord[a] = c
    return tuple(coord)
