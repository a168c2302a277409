"""Hooks that bring inputs where a module lives, and gradients where their parameter lives."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from ..core.mesh import DeviceMesh
from ..core.placements import REPLICATE, Partial, Placement, Placements, Shard
from ..core.spec import fitting_placements
from ..tensor.tensor import Tensor
from .axes import BATCH_AXES, SEQUENCE_AXES, TENSOR, dividing, placements_on
from .experts import spread_experts
from .fsdp import Sharding
from .layout import Layout
from .plan import Plan
from .stages import own_tensors, prefixes
from .styles import STYLES
from .trees import tensors_in

LABEL_WORD = "label"
"""What the name of a keyword argument says that goes to the end of the model, where the loss is."""

MASK_WORD = "mask"
"""What the name of a keyword argument says that has a number for each key, so that its dim 1 is not the sequence's."""

HANDLES = "_dtorch_hooks"
"""Where a module keeps the handles of its hooks, to take them away when it is distributed anew."""

MOVES = "_dtorch_moves"
"""Where it keeps what they share."""


def install(module: nn.Module, layout: Layout, plan: Plan, zero: int) -> None:
    """Hang the hooks: on the model, at the entrances of stages, where a style asks for a whole output, of ``fsdp`` and ``ep``."""
    moves = Moves()
    modules = dict(module.named_modules())
    handles = [
        module.register_forward_pre_hook(RootEntrance(layout.meshes[0], _end(layout, modules), moves), with_kwargs=True),
        module.register_forward_hook(RootExit(moves), always_call=True),
    ]
    for name in entrances(layout, modules):
        entrance = Entrance(layout.mesh_of(name), moves, layout.stages.of[name])
        handles.append(modules[name].register_forward_pre_hook(entrance, with_kwargs=True))
    for name, part in modules.items():
        if inputs := plan.inputs(name):
            handles.append(part.register_forward_pre_hook(Inputs(inputs, moves), with_kwargs=True))
        hook = _output_hook(plan, name)
        if hook is not None:
            handles.append(part.register_forward_hook(hook))
    handles += Sharding(zero).install(module, layout.specs)
    handles += spread_experts(module, layout.specs)
    setattr(module, HANDLES, handles)
    setattr(module, MOVES, moves)


def moves_of(module: nn.Module) -> Moves:
    """What brings a parallelized module's tensors from stage to stage."""
    return getattr(module, MOVES)


def _output_hook(plan: Plan, name: str) -> Callable[[nn.Module, tuple, Any], Any] | None:
    """What places a module's output: the plan's own word, else its style's."""
    if outputs := plan.outputs(name):
        return Outputs(outputs)
    choice = plan.choice(name, "weight")
    return OUTPUTS.get(STYLES[choice].output) if isinstance(choice, str) else None


def entrances(layout: Layout, modules: Mapping[str, nn.Module]) -> list[str]:
    """Modules whose input may come from another stage: layers, and what owns weights outside of them.

    Within a layer there is no need, unless one of its parts is tied to another stage: then every part is one.
    The model itself has an entrance of its own.
    """
    if layout.stages.count == 1:
        return []
    of, layers = layout.stages.of, set(layout.stages.layers)
    layer_of = {name: next((p for p in prefixes(name) if p in layers), None) for name in modules}
    torn = {layer for name, layer in layer_of.items() if layer is not None and of[name] != of[layer]}
    owners = (n for n, part in modules.items() if n and own_tensors(part) and (layer_of[n] is None or layer_of[n] in torn))
    return list(dict.fromkeys((*layout.stages.layers, *owners)))


def _end(layout: Layout, modules: Mapping[str, nn.Module]) -> DeviceMesh:
    """The mesh of the module that comes last: outputs live there, and labels meet them."""
    owners = [name for name, owner in modules.items() if owner._parameters]
    return layout.mesh_of(owners[-1]) if owners else layout.meshes[-1]


class Passing(Protocol):
    """A forward pass that a pipeline runs stage by stage, among others."""

    def approach(self, stage: int) -> None:
        """A module of this stage is about to be called: tensors that are brought over from now on belong to it."""

    def cut(self, tensor: Tensor) -> Tensor:
        """The tensor, or where an earlier stage computed it with a gradient, a leaf in its place at which backward ends."""

    def arrive(self) -> None:
        """The stage's inputs are on their way: stop here until its turn comes."""


class Moves:
    """Tensors that one forward pass has brought over from another stage's mesh, so that each is brought once.

    A mask or a position embedding is given to every layer; without this, each layer would fetch it anew.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.lock = threading.Lock()
        self.made: dict[tuple, tuple[Tensor, Tensor]] = {}
        self.passing: Passing | None = None
        self.laid: tuple[tuple, Tensor, Tensor] | None = None

    def enter(self) -> None:
        """A forward pass begins."""
        with self.lock:
            self.depth += 1

    def leave(self) -> None:
        """A forward pass ends: let go of the tensors."""
        with self.lock:
            self.depth -= 1
            if self.depth == 0:
                self.made.clear()
                self.laid = None

    def bring(self, tensor: Tensor, mesh: DeviceMesh) -> Tensor:
        """The tensor on a mesh; partial sums are added up on the way."""
        if tensor.device_mesh is mesh and self.passing is None:
            return tensor
        source = self.passing.cut(tensor) if self.passing is not None else tensor
        if source is tensor and tensor.device_mesh is mesh:
            return tensor
        # An inference tensor does not say whether it was written to in between.
        if self.depth == 0 or tensor.is_inference():
            return _moved(source, mesh)
        key = (id(tensor), tensor._version, mesh, torch.is_grad_enabled())
        if key not in self.made:
            self.made[key] = tensor, _moved(source, mesh)
        return self.made[key][1]

    def lay(self, tensor: Tensor, placements: Placements) -> Tensor:
        """The tensor under other placements. The last one made is kept: modules side by side take the same input."""
        if tensor.placements == placements:
            return tensor
        if self.depth == 0 or tensor.is_inference():
            return tensor.redistribute(placements=placements)
        key = (id(tensor), tensor._version, placements, torch.is_grad_enabled())
        if self.laid is None or self.laid[0] != key:
            self.laid = key, tensor, tensor.redistribute(placements=placements)
        return self.laid[2]

    def __reduce__(self) -> tuple[type[Moves], tuple[()]]:
        # Copied or pickled, it is as at its beginning: what a pass has brought is not another model's.
        return Moves, ()


def _moved(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    if tensor.device_mesh is mesh:
        # A leaf of a cut graph, which the model may want to write to.
        copied: Any = tensor.clone()
        return copied
    fits = tensor.device_mesh.shape == mesh.shape
    kept = [p if isinstance(p, Shard) else REPLICATE for p in tensor.placements]
    return tensor.redistribute(mesh, kept if fits else [REPLICATE] * mesh.ndim)


class Entrance:
    """Forward pre-hook of a module: its tensor arguments come onto its mesh."""

    def __init__(self, mesh: DeviceMesh, moves: Moves, stage: int) -> None:
        self.mesh, self.moves, self.stage = mesh, moves, stage

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        passing = self.moves.passing
        if passing is None:
            return _replaced(args, self._here), _replaced(kwargs, self._here)
        passing.approach(self.stage)
        brought = _replaced(args, self._here), _replaced(kwargs, self._here)
        passing.arrive()
        return brought

    def _here(self, value: torch.Tensor) -> torch.Tensor:
        return self.moves.bring(value, self.mesh) if isinstance(value, Tensor) else value


class Inputs:
    """Forward pre-hook of a module whose plan says how the first tensor given to it lies."""

    def __init__(self, by_axis: Mapping[str, Placement], moves: Moves) -> None:
        self.by_axis, self.moves = by_axis, moves

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return _first_replaced((args, kwargs), lambda t: self.moves.lay(t, _wanted(t, self.by_axis)))


class Outputs:
    """Forward hook of a module whose plan says how the first tensor that it returns lies."""

    def __init__(self, by_axis: Mapping[str, Placement]) -> None:
        self.by_axis = by_axis

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> Any:
        return _first_replaced(output, lambda t: t.redistribute(placements=_wanted(t, self.by_axis)))


def _wanted(tensor: Tensor, by_axis: Mapping[str, Placement]) -> Placements:
    """A tensor's placements with those of some axes replaced; a dim too short to give each device a part is not split."""
    mesh = tensor.device_mesh
    out = list(tensor.placements)
    for name in mesh.axis_names():
        if name in by_axis:
            out[mesh.axis(name)] = by_axis[name]
    for axis, name in enumerate(mesh.axis_names()):
        p = out[axis]
        if name in by_axis and isinstance(p, Shard):
            dim = p.dim % max(tensor.ndim, 1)
            pieces = math.prod(n for n, q in zip(mesh.shape, out, strict=True) if isinstance(q, Shard) and q.dim == dim)
            if p.dim >= tensor.ndim or tensor.shape[dim] < pieces:
                out[axis] = REPLICATE
    return fitting_placements(mesh, out, tensor.shape)


class RootEntrance:
    """Forward pre-hook of the whole model: plain tensors are split along the batch, and tokens along the sequence, too.

    The batch is dim 0 of the first tensor given, the sequence dim 1 of the first that looks like tokens. Other tensors are
    split where they are as long, else replicated; a mask keeps its second dim whole, for it speaks of keys. Where nothing
    is to be split they stay plain, which every operator takes as replicated. Global tensors come onto the mesh of the first
    stage, labels onto that of the last.
    """

    def __init__(self, first: DeviceMesh, last: DeviceMesh, moves: Moves) -> None:
        self.first, self.last, self.moves = first, last, moves

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        self.moves.enter()
        given = list(tensors_in((args, kwargs)))
        batch = next((t.shape[0] for t in given if t.ndim), 0)
        length = next((t.shape[1] for t in given if _is_tokens(t)), 0)
        rows = dict.fromkeys(dividing(self.first, BATCH_AXES, batch), Shard(0))
        columns = dict.fromkeys(dividing(self.first, SEQUENCE_AXES, length), Shard(1))

        def placed(name: str, value: Any) -> Any:
            mesh = self.last if LABEL_WORD in name else self.first
            along = {} if MASK_WORD in name else columns

            def place(tensor: torch.Tensor) -> torch.Tensor:
                if isinstance(tensor, Tensor):
                    return self.moves.bring(tensor, mesh)
                # A tensor that wants its gradient stays what it is, or the gradient would end up on a copy.
                if not (rows or columns) or tensor.ndim == 0 or tensor.requires_grad:
                    return tensor
                by_axis = {**(rows if tensor.shape[0] == batch else {})}
                by_axis |= along if _is_tokens(tensor) and tensor.shape[1] == length else {}
                return Tensor(tensor, device_mesh=mesh, placements=placements_on(mesh, by_axis))

            return _replaced(value, place)

        return placed("", args), {name: placed(name, value) for name, value in kwargs.items()}


def _is_tokens(tensor: torch.Tensor) -> bool:
    """Whether a tensor has the form of token ids (batch, sequence) or of embeddings (batch, sequence, features)."""
    floating = tensor.is_floating_point()
    return (tensor.ndim == 2 and not floating and tensor.dtype != torch.bool) or (tensor.ndim == 3 and floating)


class RootExit:
    """Forward hook of the whole model, called also when it fails."""

    def __init__(self, moves: Moves) -> None:
        self.moves = moves

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> None:
        self.moves.leave()


def gather_output(module: nn.Module, args: tuple, output: Any) -> Any:
    """Forward hook: outside training, a module's output is made whole over ``tp`` at once, as reading it would."""
    return output if torch.is_grad_enabled() else _replaced(output, _whole_over_tp)


def sum_output(module: nn.Module, args: tuple, output: Any) -> Any:
    """Forward hook: a module's partial output is added up at once, not anew by each operator that uses it."""
    return _replaced(output, lambda t: _whole_over_tp(t) if isinstance(t, Tensor) and t._spec.partial_axes else t)


def _whole_over_tp(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, Tensor) or TENSOR not in tensor.device_mesh.axis_names():
        return tensor
    return tensor.redistribute_by_dict({TENSOR: REPLICATE})


def settle_gradient(parameter: torch.Tensor, whole: str = "") -> None:
    """Post-accumulate hook: a gradient comes to lie as its parameter, once, not at every use by the optimizer.

    Over the axis named ``whole`` it is whole.
    """
    grad = parameter.grad
    if not isinstance(grad, Tensor) or not isinstance(parameter, Tensor):
        return
    axes = zip(parameter.device_mesh.axis_names(), parameter.placements, strict=True)
    wanted = tuple(REPLICATE if isinstance(p, Partial) or name == whole else p for name, p in axes)
    if grad.placements != wanted:
        parameter.grad = grad.redistribute(placements=wanted)


def _replaced(tree: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Nested tuples, lists and dicts with ``fn`` applied to their tensors; the very same objects where nothing changes."""
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if isinstance(tree, tuple | list):
        items = [_replaced(item, fn) for item in tree]
        if all(a is b for a, b in zip(items, tree, strict=True)):
            return tree
        return tree._make(items) if hasattr(tree, "_make") else type(tree)(items)
    if type(tree) is dict:
        named = {k: _replaced(v, fn) for k, v in tree.items()}
        return tree if all(named[k] is v for k, v in tree.items()) else named
    return tree


def _first_replaced(tree: Any, fn: Callable[[Tensor], torch.Tensor]) -> Any:
    """A nested value with ``fn`` applied to its first tensor, where that is a global one."""
    rest = iter([lambda t: fn(t) if isinstance(t, Tensor) else t])
    return _replaced(tree, lambda t: next(rest, lambda same: same)(t))


OUTPUTS: dict[str | None, Callable[[nn.Module, tuple, Any], Any]] = {"gather": gather_output, "sum": sum_output}
