"""The planner: one operator call on specs in, one plan out.

Axis by axis it prices what each candidate of the rule would move and keeps the cheapest; ties keep what lies where it
is. Choices on different axes are independent but for cuts of one dim by several axes, which the order of axes settles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from ..core.errors import MeshError, four_parts
from ..core.mesh import DeviceMesh
from ..core.placements import REPLICATE, Partial, Placement, Placements, Shard
from ..core.program import Collective, Scalar
from ..core.spec import Spec, contiguous_stride
from .builder import Builder, Changing, Value, Varying
from .call import (
    OpCall,
    OutMeta,
    draws,
    functional_of,
    has_out,
    is_view,
    leaves,
    operator_name,
    replace_leaves,
    returned_args,
    returns_written,
    schema_of,
    written_args,
)
from .cost import LATENCY_NBYTES, change_cost, group_nbytes
from .infer import infer_outputs
from .labels import Candidate
from .plan import Plan
from .redistribute import expanded_again, redistribute
from .rule import Rule
from .table import rule_for

MIXED_RULE = "tensors of one operator live on one mesh, or on stages of one parallelized model (0-d tensors follow the first one)"


def plan_call(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Plan:
    """Plan an operator call.

    Args:
        args, kwargs: the call's arguments, with a ``Spec`` for each tensor and a ``Changing`` for each number that comes
            with the call.

    Raises:
        MeshError: tensors on two meshes.
        Whatever PyTorch raises for arguments that do not fit.
    """
    specs = tuple(leaves((args, kwargs), Spec))
    leaving = specs and isinstance(kwargs.get("device"), torch.device) and kwargs["device"].type != specs[0].mesh.device_type
    if specs and not leaving and not any(s.axes or s.mesh is not specs[0].mesh for s in specs):
        return _plan_unsplit(func, args, kwargs, specs)
    builder = Builder(operator_name(func), specs, plan_into)
    values = iter(builder.inputs)
    args, kwargs = replace_leaves((args, kwargs), Spec, lambda _: next(values))
    outs, tree = plan_into(builder, func, args, kwargs)
    if returns_written(func):
        outs, tree = [], ()
    how = "replicated" if builder.replicated else "program" if builder.programmed else "rule"
    view = is_view(func) and not written_args(func)
    aliases = view and len(builder.steps) == 1 and not builder.comms
    if view and not aliases:
        outs = [expanded_again(builder, v) for v in outs]
    known = tuple(v.spec for v in outs) if tree is not None else ()
    mesh = builder.home or builder.meshes[0]
    return Plan(builder.define(outs), known, tree, tuple(builder.comms), how, mesh, aliases, _settled_inputs(builder))


def _settled_inputs(builder: Builder) -> tuple[tuple[int, Spec], ...]:
    """The inputs that the plan begins by reducing: number, and spec afterwards."""
    reduced = {v.slot: (number, v.spec) for number, v in enumerate(builder.inputs)}
    found: dict[int, Spec] = {}
    for step in builder.steps:
        if isinstance(step, Collective) and step.kind == "all_reduce" and step.source in reduced:
            number, spec = reduced[step.source]
            after = spec.replace((*spec.placements[: step.axis], REPLICATE, *spec.placements[step.axis + 1 :]))
            reduced[step.output] = (number, after)
            found[number] = after
    return tuple(found.items())


def _plan_unsplit(func: OpOverload, args: tuple, kwargs: dict[str, Any], specs: tuple[Spec, ...]) -> Plan:
    """The plan where nothing varies over the mesh: the operator itself, once."""
    builder, mesh = Builder(operator_name(func), specs, plan_into), specs[0].mesh
    given = replace_leaves((args, kwargs), Changing, lambda c: c.value)
    # What an operator with ``out=`` takes, and makes of it, only its kernel knows.
    inferred = None if has_out(func) else infer_outputs(func, *given)
    builder.random = draws(func, *given)
    whole = (REPLICATE,) * mesh.ndim
    if inferred is None:
        outs = [Spec.make(mesh, whole, (), specs[0].dtype)] * len(schema_of(func).returns)
    else:
        outs = [Spec.make(mesh, whole, m.shape, m.dtype, m.stride) for m in inferred[0]]
    values = iter(builder.inputs)
    args, kwargs = replace_leaves((args, kwargs), Spec, lambda _: next(values))
    args, kwargs = replace_leaves((args, kwargs), Changing, lambda c: Scalar(c.index))
    results = builder.local(func, args, kwargs, _with_gaps(func, inferred and inferred[1], outs), mesh)
    if returns_written(func):
        return Plan(builder.define([]), (), (), (), "rule", mesh, False)
    tree, known = (None, ()) if inferred is None else (inferred[1], tuple(outs))
    return Plan(builder.define(results), known, tree, (), "rule", mesh, is_view(func) and not written_args(func))


def plan_into(builder: Builder, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> tuple[list[Value], Any]:
    """Append the steps of an operator call on values; returns its tensor outputs and the shape of its result tree.

    The tree is None where only a run can tell the outputs' shapes.
    """
    given = replace_leaves((args, kwargs), Changing, lambda c: c.value)
    spec_args, spec_kwargs = replace_leaves(given, Value, lambda v: v.spec)
    values: list[Value] = list(leaves((args, kwargs), Value))
    inferred = infer_outputs(func, spec_args, spec_kwargs)
    builder.random |= draws(func, spec_args, spec_kwargs)
    home = _home(builder, func, (spec_args, spec_kwargs), values)
    if home is not None:
        home = _on_device(func, home, kwargs.get("device"))
        builder.home = builder.home or home
        followers = iter([v if v.spec.mesh is home else _brought(builder, v, home) for v in values])
        args, kwargs = replace_leaves((args, kwargs), Value, lambda _: next(followers))
        values = list(leaves((args, kwargs), Value))
    if inferred is None:
        return _opaque(builder, func, args, kwargs, values), None
    metas, tree = inferred
    call = OpCall(
        func, *replace_leaves(replace_leaves((args, kwargs), Value, lambda v: v.spec), Changing, lambda c: Scalar(c.index))
    )
    object.__setattr__(call, "outs", metas)
    return _Planning(builder, call, args, kwargs, values, tree).run(), tree


def _with_gaps(func: OpOverload, tree: Any, outs: list[Spec]) -> Sequence[Spec | None]:
    """The outputs by position, None where the call's result has none: some kernels give one there all the same."""
    if not isinstance(tree, tuple) or None not in tree or any(str(r.type) != "Tensor" for r in schema_of(func).returns):
        return outs
    given = iter(outs)
    return [None if item is None else next(given) for item in tree]


def _home(builder: Builder, func: OpOverload, spec_args: tuple, values: Sequence[Value]) -> Any:
    """The mesh an operator runs on: where it writes, else where the most data lies; the first such, a 0-d tensor's last.

    Raises:
        MeshError: tensors on meshes that have nothing to do with each other, or writes on two meshes.
    """
    if not values:
        return None
    if len({v.spec.mesh for v in values}) == 1:
        return values[0].spec.mesh
    written = [values[i] for i in _inputs_named(OpCall(func, *spec_args), written_args(func))]
    weighty = [v for v in values if v.spec.shape] or list(values)
    home = (written[0] if written else max(weighty, key=lambda v: v.spec.nbytes)).spec.mesh
    other = next((v.spec.mesh for v in written if v.spec.mesh is not home), None)
    other = other or next((v.spec.mesh for v in values if v.spec.shape and not v.spec.mesh.akin(home)), None)
    if other is not None:
        raise MeshError(
            four_parts(
                f"{builder.operator} on a tensor on {home!r} and one on {other!r}",
                MIXED_RULE,
                "the operator on your line",
                "bring one over with t.redistribute(device_mesh=...)",
            )
        )
    return home


def _on_device(func: OpOverload, home: DeviceMesh, device: Any) -> DeviceMesh:
    """The mesh of the results: where a copy is asked for on another type of device, the same mesh on that type."""
    if not isinstance(device, torch.device) or device.type == home.device_type:
        return home
    if func is torch.ops.aten._to_copy.default:
        return home.on(device.type)
    remedy = "make the result on the mesh, and bring it over with t.redistribute(device_mesh=...) or read it with t.to_torch()"
    rule = f"what is made of a tensor on {home!r} is on its mesh"
    raise MeshError(four_parts(f"{operator_name(func)} on device {device}", rule, "argument device", remedy))


def _brought(builder: Builder, value: Value, home: DeviceMesh) -> Value:
    """A value on another mesh: split alike on one of the same shape, else replicated."""
    placements: Sequence[Placement] = (REPLICATE,) * home.ndim
    if value.spec.mesh.shape == home.shape:
        placements = [p if isinstance(p, Shard) else REPLICATE for p in value.spec.placements]
    return redistribute(builder, value, value.spec.replace(placements, home))


def _replicated(builder: Builder, value: Value) -> Value:
    return redistribute(builder, value, value.spec.replace((REPLICATE,) * value.spec.mesh.ndim))


def _opaque(builder: Builder, func: OpOverload, args: tuple, kwargs: dict[str, Any], values: Sequence[Value]) -> list[Value]:
    """Replicate, run, and let the client ask for the outputs' shapes."""
    whole = [_replicated(builder, v) for v in values]
    written = _inputs_named(OpCall(func, *replace_leaves((args, kwargs), Value, lambda v: v.spec)), written_args(func))
    for i in written:
        if whole[i] is not values[i]:
            continue
        whole[i] = builder.local("aten::clone.default", [whole[i]], {}, [whole[i].spec])[0]
    given = iter(whole)
    args, kwargs = replace_leaves((args, kwargs), Value, lambda _: next(given))
    placeholder = Spec.make(values[0].spec.mesh, (REPLICATE,) * values[0].spec.mesh.ndim, (), values[0].spec.dtype)
    outs = builder.local(func, args, kwargs, [placeholder] * len(schema_of(func).returns))
    for i in written:
        placed = redistribute(builder, whole[i], values[i].spec)
        builder.local("aten::copy_.default", [values[i], placed], {}, [values[i].spec])
    return outs


class _Planning:
    """The planning of one operator call."""

    def __init__(
        self, builder: Builder, call: OpCall, args: tuple, kwargs: dict[str, Any], values: list[Value], tree: Any
    ) -> None:
        self.builder, self.call, self.args, self.kwargs, self.values = builder, call, args, kwargs, values
        self.tree = tree
        self.mesh = values[0].spec.mesh
        self.written = _inputs_named(call, written_args(call.func))
        self.returned = _inputs_named(call, returned_args(call.func)) if returns_written(call.func) else []
        self.rule: Rule | None = None

    def run(self) -> list[Value]:
        """Choose and write: a row, a program, the functional form copied back, or replication."""
        if not any(v.spec.axes for v in self.values):
            return self.emit(self.trivial())
        self.rule = rule_for(self.call.func)
        if self.rule is not None and not self.rule.random and draws(self.call.func, self.call.args, self.call.kwargs):
            self.rule = None
        sharding = self.rule.shard(self.call) if self.rule is not None else None
        chosen = self.choose(sharding) if sharding is not None else None
        if chosen is not None and (chosen[0] == 0 or self.rule is None or self.rule.program is None):
            return self.emit(chosen[1], sharding)
        if self.written and not (self.rule is not None and self.rule.writes):
            return self.emit(chosen[1], sharding) if chosen is not None else self.write_back()
        if self.rule is not None and self.rule.program is not None:
            outs = self.rule.program(self.builder, self.call, self.args, self.kwargs)
            if outs is not None:
                self.builder.programmed = True
                return [self.conformed(v, m) for v, m in zip(outs, self.call.outs, strict=True)]
        if chosen is not None:
            return self.emit(chosen[1], sharding)
        return self.write_back() if self.written else self.replicate()

    def conformed(self, value: Value, meta: OutMeta) -> Value:
        """A program's output, contiguous where the operator's own is, so that the same views are possible."""
        spec = value.spec
        assert spec.shape == meta.shape and spec.dtype == meta.dtype, f"program of {self.call.func} gives {spec}, not {meta}"
        if spec.meta.is_contiguous() or meta.stride != contiguous_stride(meta.shape):
            return value
        target = Spec.make(spec.mesh, spec.placements, spec.shape, spec.dtype)
        return self.builder.local("aten::clone.default", [value], {"memory_format": torch.contiguous_format}, [target])[0]

    def trivial(self) -> tuple[list[Placements], list[Placements]]:
        whole = (REPLICATE,) * self.mesh.ndim
        return [v.spec.placements for v in self.values], [whole] * len(self.call.outs)

    def choose(self, sharding: Any) -> tuple[float, tuple[list[Placements], list[Placements]]] | None:
        """The cheapest candidate on every axis: its price, and the placements of inputs and outputs."""
        specs = [v.spec for v in self.values]
        ins: list[list[Placement]] = [[] for _ in specs]
        outs: list[list[Placement]] = [[] for _ in self.call.outs]
        cuts: dict[str, tuple[int, ...]] = {}
        moved = 0.0
        for axis in range(self.mesh.ndim):
            candidate = (
                self.cheapest(sharding.candidates(axis, specs, cuts), axis, specs)
                if self.mesh.shape[axis] > 1
                else self.kept(specs, axis)
            )
            if candidate is None:
                return None
            moved += sum(change_cost(s, axis, s.placements[axis], p) for s, p in zip(specs, candidate.inputs, strict=True))
            for row, placement in zip((*ins, *outs), (*candidate.inputs, *candidate.outputs), strict=True):
                row.append(placement)
            if candidate.label is not None:
                cuts[candidate.label] = candidate.sizes
        return moved, ([tuple(p) for p in ins], [tuple(p) for p in outs])

    def kept(self, specs: Sequence[Spec], axis: int) -> Candidate:
        """On an axis of one device every placement is the same: outputs are replicated, inputs and destinations stay."""
        outs = [
            specs[self.returned[i]].placements[axis] if i < len(self.returned) else REPLICATE for i in range(len(self.call.outs))
        ]
        return Candidate(tuple(s.placements[axis] for s in specs), tuple(outs))

    def cheapest(self, candidates: Sequence[Candidate], axis: int, specs: Sequence[Spec]) -> Candidate | None:
        """The candidate that moves least. Gathering several inputs counts twice: every device holds and does it all then."""
        best, price = None, float("inf")
        for candidate in candidates:
            if not self.allowed(candidate, axis, specs):
                continue
            cost = sum(change_cost(s, axis, s.placements[axis], p) for s, p in zip(specs, candidate.inputs, strict=True))
            split = [s for s in specs if isinstance(s.placements[axis], Shard)]
            if len(split) > 1 and set(candidate.inputs) == {REPLICATE}:
                cost += sum(change_cost(s, axis, s.placements[axis], REPLICATE) for s in split)
            cost += sum(self.partial_cost(m, p, axis, specs) for m, p in zip(self.call.outs, candidate.outputs, strict=True))
            if cost < price:
                best, price = candidate, cost
        return best

    def partial_cost(self, meta: OutMeta, placement: Placement, axis: int, specs: Sequence[Spec]) -> float:
        """What reducing a partial output later would move, so that deferring is not mistaken for free."""
        if not isinstance(placement, Partial):
            return 0
        nbytes = meta.shape.numel() * meta.dtype.itemsize
        # What splits an input along other axes is taken to split the output.
        scale = min(group_nbytes(spec, axis) / max(spec.nbytes, 1) for spec in specs)
        return 2 * (self.mesh.shape[axis] - 1) * nbytes * scale + LATENCY_NBYTES

    def allowed(self, candidate: Candidate, axis: int, specs: Sequence[Spec]) -> bool:
        """A written tensor keeps its placement."""
        if any(candidate.inputs[i] != specs[i].placements[axis] for i in self.written):
            return False
        return all(candidate.outputs[out] == specs[i].placements[axis] for out, i in enumerate(self.returned))

    def emit(self, placements: tuple[list[Placements], list[Placements]], sharding: Any = None) -> list[Value]:
        """Redistribute the inputs as chosen and run the operator on the pieces."""
        ins = [redistribute(self.builder, v, v.spec.replace(p)) for v, p in zip(self.values, placements[0], strict=True)]
        outs = [Spec.make(self.mesh, p, m.shape, m.dtype, m.stride) for m, p in zip(self.call.outs, placements[1], strict=True)]
        moved = iter(ins)
        args, kwargs = replace_leaves((self.args, self.kwargs), Value, lambda _: next(moved))
        steps = getattr(sharding, "steps", None)
        composed = steps(self.builder, self.call, args, kwargs, outs) if steps is not None else None
        if composed is not None:
            return list(composed)
        args, kwargs = self.localize(sharding, args, kwargs, [v.spec for v in ins], outs)
        func = self.call.func
        if getattr(sharding, "instead", None) is not None:
            func, extra = sharding.instead
            args, kwargs = (*ins, *extra), {}
        if func in _VIEWS and ins[0].slot != self.values[0].slot:
            # What moved is dense. Overlapping memory, as unfold gives, may have been viewed where that has to be copied.
            func = torch.ops.aten.reshape.default
        results = self.builder.local(func, args, kwargs, _with_gaps(func, self.tree, outs), self.mesh)
        for out, i in enumerate(self.returned):
            results[out] = self.values[i] if self.values[i].spec is outs[out] else Value(self.values[i].slot, outs[out])
        return results

    def localize(
        self, sharding: Any, args: tuple, kwargs: dict[str, Any], ins: list[Spec], outs: list[Spec]
    ) -> tuple[tuple, dict[str, Any]]:
        """Replace arguments that hold global sizes by local ones."""
        local: dict[str, Any] = {}
        for name, number in (getattr(sharding, "shape_args", None) or {}).items():
            local[name] = _local_shape(outs[number])
        if hasattr(sharding, "local_args"):
            local.update(sharding.local_args(self.call, ins, outs))
        names = [a.name for a in schema_of(self.call.func).arguments]
        positional = tuple(local.get(name, value) for name, value in zip(names, args, strict=False))
        rest = {n: v for n, v in local.items() if n not in names[: len(args)]}
        return positional, {**kwargs, **rest}

    def replicate(self) -> list[Value]:
        """No row fits: run the whole operator everywhere."""
        self.builder.replicated = True
        whole = (REPLICATE,) * self.mesh.ndim
        return self.emit(([whole] * len(self.values), [whole] * len(self.call.outs)))

    def write_back(self) -> list[Value]:
        """An operator that writes, where no row keeps the destination's placement: compute apart, then copy."""
        functional = functional_of(self.call.func)
        outs: list[Value] = []
        if functional is not None and len(self.returned) == len(self.written):
            results = self._functional_results(functional)
        else:
            results, outs = self._replicated_results()
        for i, result in zip(self.written, results, strict=True):
            target = self.values[i]
            placed = redistribute(self.builder, result, result.spec.replace(target.spec.placements))
            self.builder.local("aten::copy_.default", [target, placed], {}, [target.spec], self.mesh)
        return [self.values[i] for i in self.returned] if self.returned else outs

    def _functional_results(self, functional: OpOverload) -> list[Value]:
        outs = {a.name for a in schema_of(self.call.func).arguments if a.is_out}
        kwargs = {k: v for k, v in self.kwargs.items() if k not in outs}
        for argument in schema_of(self.call.func).arguments[len(self.args) :]:
            if argument.has_default_value() and argument.default_value is not None:
                kwargs.setdefault(argument.name, argument.default_value)
        results, _ = plan_into(self.builder, functional, self.args, kwargs)
        return results

    def _replicated_results(self) -> tuple[list[Value], list[Value]]:
        """Run the writing operator on replicated copies: the written copies, and what it returns besides."""
        self.builder.replicated = True
        whole = [_replicated(self.builder, v) for v in self.values]
        for i in self.written:
            whole[i] = self.builder.local("aten::clone.default", [whole[i]], {}, [whole[i].spec], self.mesh)[0]
        moved = iter(whole)
        args, kwargs = replace_leaves((self.args, self.kwargs), Value, lambda _: next(moved))
        outs = [Spec.make(self.mesh, (REPLICATE,) * self.mesh.ndim, m.shape, m.dtype, m.stride) for m in self.call.outs]
        fresh = self.builder.local(self.call.func, args, kwargs, _with_gaps(self.call.func, self.tree, outs), self.mesh)
        return [whole[i] for i in self.written], fresh


_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def _local_shape(spec: Spec) -> Varying:
    return Varying(lambda coord: list(spec.local_box(coord)[1]))


def _inputs_named(call: OpCall, names: Sequence[str]) -> list[int]:
    """Numbers, among the tensor inputs, of those given for these arguments."""
    if not names:
        return []
    order = [a.name for a in schema_of(call.func).arguments]
    placed = dict(zip(order, call.args, strict=False)) | call.kwargs
    numbers: list[int] = []
    at = 0
    for name in [n for n in order[: len(call.args)]] + list(call.kwargs):
        count = len(list(leaves(placed[name], Spec)))
        if name in names:
            numbers.extend(range(at, at + count))
        at += count
    return numbers
