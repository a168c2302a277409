"""The axis ``fsdp``: weights split between their uses, gathered block by block when they are used.

A block is one layer of the model; all that is in no layer is one block too, that of the model itself. While a block runs,
its modules hold whole weights in place of the split ones. After it has run, the modules hold the split parameters again,
and the memory of the whole ones is given back (``tensor/gathered.py``); the backward pass has it brought back by using
them. The gradients of a block leave it together, at the end of its backward pass.

The split parameters are ordinary global tensors. What uses one outside of its block has it gathered by the planner.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from ..core.errors import UsageError, four_parts
from ..core.mesh import DeviceMesh
from ..core.placements import REPLICATE, Shard
from ..core.spec import Spec
from ..tensor.gathered import Gathered
from ..tensor.moving import dense_stride, held_anew, redistributed
from ..tensor.tensor import Tensor
from ..tensor.together import gradients_together
from .axes import SHARDED
from .stages import find_layers
from .trees import tensors_in

LEVELS = {
    3: "zero=3: weights over fsdp are gathered layer by layer while they are in use",
    2: "zero=2: weights over fsdp are gathered layer by layer, and kept until they change",
    1: "zero=1: weights over fsdp are gathered layer by layer and kept until they change; their gradients are whole",
}
"""What each level does, as ``describe`` has it."""

GATHER, REDUCE = "fsdp weights", "fsdp gradients"
"""What reports call the communication of a block."""

_task = torch._C._current_graph_task_id
NO_TASK = -1
"""What ``_task`` gives outside of a backward pass."""


def check_zero(zero: Any) -> None:
    """Refuse what is no level of sharding.

    Raises:
        UsageError: it is none.
    """
    if zero not in LEVELS:
        raise UsageError(
            four_parts(
                f"zero={zero!r}",
                "3 splits weights, gradients and optimizer state, 2 keeps gathered weights, 1 keeps whole gradients too",
                "parallelize(module, mesh, zero=...)",
                f"use one of {tuple(LEVELS)}",
            )
        )


@dataclass(frozen=True, slots=True)
class Back:
    """Memory of a block that came back for a backward pass, or for a stray use outside of one."""

    block: Block
    memory: Gathered
    thread: int
    task: int


class Sharding:
    """What the blocks of one model share.

    Attributes:
        zero: as given to ``parallelize``.
        wholes: parameters that stand whole just now, by id, with what stands for them.
        back: memory that came back since its block ran.
        lock: held while weights change places. Several threads may run the model, but not change it at once: what one of
            them had put in place half way, another would take for parameters.
    """

    def __init__(self, zero: int) -> None:
        self.zero = zero
        self.wholes: dict[int, tuple[Tensor, Tensor]] = {}
        self.back: list[Back] = []
        self.lock = threading.RLock()

    def __reduce__(self) -> tuple[type[Sharding], tuple[int]]:
        # Copied or pickled, it is as at its beginning.
        return Sharding, (self.zero,)

    def install(self, module: nn.Module, specs: Mapping[str, Spec]) -> list[Any]:
        """Hang a block's hooks on the model and on each of its layers; gives their handles. None where nothing is split."""
        if all(split_axis(spec) is None for spec in specs.values()):
            return []
        modules = dict(module.named_modules())
        layers = [modules[name] for name in find_layers(module)]
        inside = {part for layer in layers for part in layer.modules()}
        parts = [(module, [m for m in modules.values() if m not in inside]), *((m, list(m.modules())) for m in layers)]
        handles = []
        for number, (owner, members) in enumerate(parts):
            slots = [(m, name) for m in members for name in m._parameters]
            if slots or number == 0:
                block = Block(self, slots, outermost=number == 0)
                handles.append(owner.register_forward_pre_hook(block.enter))
                handles.append(owner.register_forward_hook(block.leave, always_call=True))
        return handles

    def home(self, spec: Spec) -> Spec:
        """Where the gradient of a parameter belongs."""
        return whole_spec(spec) if self.zero == 1 else spec

    def note(self, block: Block, memory: Gathered) -> None:
        """Remember memory that came back, to let it go when the backward pass ends at the latest."""
        task = _task()
        if task != NO_TASK and all(b.task != task for b in self.back):
            Variable._execution_engine.queue_callback(partial(self.release, task=task))
        self.back.append(Back(block, memory, threading.get_ident(), task))

    def release(self, task: int | None = None, block: Block | None = None, but: Block | None = None) -> None:
        """Let memory go that came back: in a backward pass, or in this thread of a block, of all but one, or of all."""
        here = threading.get_ident()
        for entry in list(self.back):
            matches = entry.task == task if task is not None else entry.thread == here
            others = but is None or not (entry.block is but or entry.block.outermost)
            if matches and others and (block is None or entry.block is block):
                self.back.remove(entry)
                entry.memory.drop()


class Block:
    """Parameters that are gathered together: pre-hook and hook of the module that uses them.

    Args:
        sharding: what it shares with the other blocks.
        slots: the modules that hold its parameters, and under which names.
        outermost: it is the model's own, within which the others run.

    What stands whole belongs to the thread that entered last; ``inside`` are all that have not left.
    """

    def __init__(self, sharding: Sharding, slots: Sequence[tuple[nn.Module, str]], outermost: bool) -> None:
        self.sharding, self.slots, self.outermost = sharding, slots, outermost
        self.depth = 0
        self.thread = 0
        self.inside: set[int] = set()
        self.standing: list[Standing] = []
        self.memories: list[Gathered] = []
        self.kept: dict[DeviceMesh, Gathered] = {}

    def __deepcopy__(self, memo: dict) -> Block:
        copied = memo[id(self)] = object.__new__(Block)
        slots = [(copy.deepcopy(m, memo), name) for m, name in self.slots]
        copied.__init__(copy.deepcopy(self.sharding, memo), slots, self.outermost)  # type: ignore[misc]
        return copied

    def enter(self, module: nn.Module, args: tuple) -> None:
        """Before the module runs: whole weights take the place of split ones."""
        with self.sharding.lock:
            if self.depth and not _runs_already(module):
                self._forget()
            self.depth += 1
            self.thread = threading.get_ident()
            self.inside.add(self.thread)
            if self.depth > 1:
                return
            if self.outermost and _task() == NO_TASK:
                self.sharding.release()
            try:
                self._gather()
            except BaseException:
                self._forget()
                raise

    def leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        """After the module has run, or failed: the split parameters stand again, and the whole ones' memory is let go."""
        with self.sharding.lock:
            if self.depth == 0 or self.thread != threading.get_ident():
                # What it had put in place, another thread has replaced.
                self.inside.discard(threading.get_ident())
                return
            self.depth -= 1
            if self.depth:
                return
            self.inside.discard(self.thread)
            # Another thread that is still within may be about to use a weight: it goes with its last use then.
            memories, frozen = [] if self.inside and self.sharding.zero == 3 else self.memories, self.has_frozen()
            self._restore()
        for memory in memories:
            if self.sharding.zero < 3:
                memory.write_back()
            elif _task() == NO_TASK:
                memory.drop()
            else:
                # An activation checkpoint is computed again, and the backward pass of the block comes next.
                self.sharding.note(self, memory)
        if frozen and torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._begin)

    def has_frozen(self) -> bool:
        """Whether a whole weight stands here that gets no gradient, whose last use the gradients do not tell."""
        return any(not s.parameter.requires_grad for s in self.standing)

    def done(self, frozen: bool) -> None:
        """The gradients of all whole weights are there."""
        if not frozen:
            self.sharding.release(block=self)

    def _begin(self, grad: torch.Tensor) -> None:
        """The backward pass reaches the block's output: it is done with other blocks."""
        self.sharding.release(but=self)

    def _gather(self) -> None:
        named: list[tuple[nn.Module, str, Any]] = [(m, name, m._parameters.get(name)) for m, name in self.slots]
        here = [(m, name, p) for m, name, p in named if isinstance(p, Tensor)]
        fresh: dict[DeviceMesh, dict[int, Tensor]] = {}
        for _, _, p in here:
            if not self._stands(p) and (split_axis(p._spec) is not None or _wants_gradient(p)):
                fresh.setdefault(p.device_mesh, {})[id(p)] = p
        for mesh, parameters in fresh.items():
            self._stand(mesh, list(parameters.values()))
        own = {number for parameters in fresh.values() for number in parameters}
        for module, name, p in here:
            if self._stands(p):
                whole = self.sharding.wholes[id(p)][1]
                self.standing.append(Standing(module, name, p, whole, whole._value, id(p) in own))
                module._parameters[name] = whole  # type: ignore[assignment]

    def _stands(self, parameter: Tensor) -> bool:
        """Whether an enclosing block, or this one, has the parameter whole, in a way that serves here."""
        known = self.sharding.wholes.get(id(parameter))
        return known is not None and (known[1].requires_grad or not _wants_gradient(parameter))

    def _stand(self, mesh: DeviceMesh, parameters: list[Tensor]) -> None:
        """Gather parameters of one mesh."""
        split = [p for p in parameters if split_axis(p._spec) is not None]
        made = iter(self._made(mesh, split))
        wholes = [held_anew(p) if split_axis(p._spec) is None else next(made) for p in parameters]
        if any(_wants_gradient(p) for p in parameters):
            wholes = list(Whole.apply(self, wholes, *parameters))
        for parameter, whole in zip(parameters, wholes, strict=True):
            whole._is_param = True
            self.sharding.wholes[id(parameter)] = parameter, whole

    def _made(self, mesh: DeviceMesh, split: list[Tensor]) -> list[Tensor]:
        """Whole tensors of split ones, gathered now or, below ``zero=3``, before."""
        if not split:
            return []
        memory = self.kept.get(mesh)
        if memory is None or not memory.fresh(split):
            memory = Gathered(split, [whole_spec(p._spec) for p in split], GATHER, partial(self.sharding.note, self))
        self.memories.append(memory)
        if self.sharding.zero < 3:
            self.kept[mesh] = memory
            return [held_anew(t) for t in memory.made]
        made, memory.made = memory.made, []
        return made

    def _restore(self) -> None:
        for s in self.standing:
            if s.module._parameters.get(s.name) is s.whole:
                s.module._parameters[s.name] = s.parameter  # type: ignore[assignment]
            if s.own and s.whole._value is not s.value:
                # Somebody has set its ``data``.
                s.parameter.data = redistributed(s.whole.detach(), s.parameter.device_mesh, s.parameter.placements)
            if s.own:
                self.sharding.wholes.pop(id(s.parameter), None)
        self.standing, self.memories = [], []

    def _forget(self) -> None:
        """A pass was broken off without a word, or another thread's is under way, which may go on with what it has."""
        self._restore()
        self.depth = 0


@dataclass(frozen=True, slots=True)
class Standing:
    """A whole weight in the place of a parameter. ``own``: this block has gathered it, not an enclosing one."""

    module: nn.Module
    name: str
    parameter: Tensor
    whole: Tensor
    value: Any
    own: bool


class Whole(torch.autograd.Function):
    """Whole weights as functions of the parameters: the gradients come back split, those of a block together."""

    @staticmethod
    def forward(ctx: Any, block: Block, wholes: list[Tensor], *parameters: Tensor) -> tuple[Tensor, ...]:
        frozen = [w for w, p in zip(wholes, parameters, strict=True) if not p.requires_grad]
        ctx.block, ctx.frozen = block, bool(frozen)
        ctx.homes = [block.sharding.home(p._spec) for p in parameters]
        ctx.mark_non_differentiable(*frozen)
        ctx.set_materialize_grads(False)
        return tuple(wholes)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        placed = gradients_together(grads, ctx.homes, REDUCE)
        ctx.block.done(ctx.frozen)
        return (None, None, *placed)


def split_axis(spec: Spec) -> int | None:
    """The mesh axis ``fsdp``, if it splits the tensor."""
    names = spec.mesh.axis_names()
    axis = names.index(SHARDED) if SHARDED in names else None
    return axis if axis in spec.axes and isinstance(spec.placements[axis], Shard) else None


def whole_spec(spec: Spec) -> Spec:
    """The tensor whole over ``fsdp``."""
    axis = split_axis(spec)
    if axis is None:
        return spec
    placements = (*spec.placements[:axis], REPLICATE, *spec.placements[axis + 1 :])
    return Spec.make(spec.mesh, placements, spec.shape, spec.dtype, dense_stride(spec))


def _wants_gradient(parameter: torch.Tensor) -> bool:
    return parameter.requires_grad and torch.is_grad_enabled()


def _runs_already(module: nn.Module) -> bool:
    """Whether this thread is in a call of the module besides the one that begins."""
    frame, calls = sys._getframe(), 0
    while frame.f_back is not None:
        frame = frame.f_back
        calls += frame.f_code is _CALL and frame.f_locals.get("self") is module
    return calls > 1


_CALL = nn.Module._call_impl.__code__
