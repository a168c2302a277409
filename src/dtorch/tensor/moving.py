"""Putting data on a mesh, moving it between placements and meshes, and reading it back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..core.mesh import DeviceMesh
from ..core.placements import REPLICATE, Partial, Placement
from ..core.program import Call, Fetch, MeshInfo, Put
from ..core.spec import Spec, fitting_placements
from ..sharding import layouts
from ..sharding.builder import Builder
from ..sharding.plan import Plan
from ..sharding.planner import plan_into
from ..sharding.redistribute import redistribute as plan_redistribute
from . import aliasing, watch
from .client import Client, closed_error, current_client
from .future import TensorFuture
from .hotpath import Value
from .sites import current_site
from .wrapper import wrap


def client_of(tensor: Any) -> Client:
    """The session that holds a tensor.

    Raises:
        SessionClosedError: that session is over.
    """
    client = tensor._value.client
    if client.closed:
        raise closed_error()
    return client


def run_plan(key: tuple, make: Callable[[], Plan], tensors: Sequence[Any], explicit: bool = False) -> list[Any]:
    """Run a plan that is no operator call, cached under ``key``; returns its outputs."""
    client = client_of(tensors[0]) if tensors else current_client()
    entry = client.cache.get(key)
    if entry is None:
        made = make()
        entry = PlannedMove(made, client.define(made))
        client.remember(key, entry)
    site = current_site()
    watch.observe(entry.plan, site, explicit)
    for tensor in tensors:
        if tensor._value.group is not None:
            aliasing.refresh(tensor._value.group)
    outs = [Value(client, client.new_handle()) for _ in entry.plan.outs]
    client.call(Call(entry.number, [t._value.handle for t in tensors], [v.handle for v in outs], []), site, entry.nbytes)
    cls = type(tensors[0])
    return [wrap(cls, spec, value) for spec, value in zip(entry.plan.outs, outs, strict=True)]


class PlannedMove:
    """A cached plan of ``run_plan``."""

    __slots__ = ("nbytes", "number", "plan")

    def __init__(self, plan: Plan, number: int) -> None:
        self.plan, self.number = plan, number
        self.nbytes = 0 if plan.aliases else sum(out.nbytes for out in plan.outs)


def move(tensor: Any, target: Spec, explicit: bool = True, reason: str = "redistribute") -> Any:
    """The same values under the target's mesh and placements, outside autograd; the tensor itself if nothing changes.

    Where no device's piece changes, the result shares the tensor's memory. ``reason`` is the operator that reports name.
    """
    source = tensor._spec
    if source is target:
        return tensor
    if same_pieces(source, target):
        return wrap(type(tensor), target, tensor._value)

    def make() -> Plan:
        builder = Builder(reason, [source], plan_into)
        out = plan_redistribute(builder, builder.inputs[0], target)
        return Plan(builder.define([out]), (target,), ..., tuple(builder.comms), "redistribute", source.mesh, False)

    return run_plan((reason, source, target), make, [tensor], explicit)[0]


def same_pieces(source: Spec, target: Spec) -> bool:
    """Whether two specs differ only along mesh axes of one device."""
    if source.mesh is not target.mesh:
        return False
    return all(p == q or k == 1 for p, q, k in zip(source.placements, target.placements, source.mesh.shape, strict=True))


def dense_stride(spec: Spec) -> tuple[int, ...]:
    """The stride of a copy: the spec's own where its elements lie without gaps, else in the same order without them."""
    if torch.ops.aten.is_non_overlapping_and_dense.default(spec.meta):
        return spec.stride
    stride, step = [0] * len(spec.shape), 1
    for d in reversed(spec.order):
        stride[d], step = step, step * max(spec.shape[d], 1)
    return tuple(stride)


def held_anew(tensor: Any) -> Any:
    """Another wrapper over the same value, outside autograd."""
    return wrap(type(tensor), tensor._spec, tensor._value)


def alias(tensor: Any) -> Any:
    """A second hold on a tensor's memory."""

    def make() -> Plan:
        builder = Builder("alias", [tensor._spec], plan_into)
        out = builder.local("aten::alias.default", [builder.inputs[0]], {}, [tensor._spec])
        return Plan(builder.define(out), (tensor._spec,), ..., (), "rule", tensor._spec.mesh, True)

    return run_plan(("alias", tensor._spec), make, [tensor])[0]


class Redistribute(torch.autograd.Function):
    """Redistribution is the identity on global values, and so is its gradient; it goes back to where the input was."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, target: Spec) -> Any:
        ctx.source = tensor._spec
        return move(tensor, target)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, None]:
        if not hasattr(grad, "_spec"):
            return grad, None
        placements = [REPLICATE if isinstance(p, Partial) else p for p in ctx.source.placements]
        return redistributed(grad, ctx.source.mesh, placements), None


def send_gradients_home(tensors: Sequence[Any]) -> None:
    """See that the gradients of tensors which meet from several meshes come back to each one's own mesh."""
    for tensor in tensors:
        if tensor.requires_grad and not _goes_home(tensor):
            tensor.register_hook(Homeward(tensor._spec))


def _goes_home(tensor: Any) -> bool:
    """Whether a leaf has its hook: it meets others in every step, and keeps it. What is computed loses it when written."""
    hooks = (tensor._backward_hooks or {}).values() if tensor.is_leaf else ()
    return any(isinstance(hook, Homeward) and hook.mesh is tensor._spec.mesh for hook in hooks)


class Homeward:
    """Hook of a tensor: its gradient comes to the tensor's mesh."""

    def __init__(self, spec: Spec) -> None:
        self.mesh = spec.mesh
        self.placements = [REPLICATE if isinstance(p, Partial) else p for p in spec.placements]

    def __call__(self, grad: Any) -> Any:
        stays = not hasattr(grad, "_spec") or grad._spec.mesh is self.mesh
        return grad if stays else redistributed(grad, self.mesh, self.placements)


def redistributed(tensor: Any, mesh: DeviceMesh | None, placements: Sequence[Placement] | None) -> Any:
    """``tensor`` on another mesh or under other placements, differentiably; see ``Tensor.redistribute``."""
    source = tensor._spec
    if placements is None:
        same = mesh is None or mesh.ndim == source.mesh.ndim
        placements = source.placements if same else (REPLICATE,) * mesh.ndim  # type: ignore[union-attr]
        placements = fitting_placements(mesh or source.mesh, placements, source.shape)
    target = source.replace(placements, mesh)
    if target is source:
        return tensor
    if not same_pieces(source, target):
        target = Spec.make(target.mesh, target.placements, target.shape, target.dtype, dense_stride(source))
    else:
        # A view to autograd too, so that a write to either is seen by both.
        out = torch.ops.aten.alias.default(tensor)
        out._spec = target
        return out
    return Redistribute.apply(tensor, target) if tensor.requires_grad and torch.is_grad_enabled() else move(tensor, target)


def replicated(tensor: Any) -> Any:
    """The tensor replicated on its mesh, outside autograd."""
    return move(tensor, tensor._spec.replace((REPLICATE,) * tensor._spec.mesh.ndim))


def put(cls: type, tensor: torch.Tensor, mesh: DeviceMesh, copy: bool = True) -> Any:
    """A plain tensor replicated on a mesh; without ``copy`` the caller gives its memory away."""
    client = current_client()
    layouts.dense(tensor, "the operator on your line, which mixes it with a global tensor")
    own = tensor.detach().clone() if copy else tensor.detach()
    spec = Spec.make(mesh, (REPLICATE,) * mesh.ndim, own.shape, own.dtype, own.stride())
    value = Value(client, client.new_handle())
    client.check_mesh(mesh)
    client.emit(Put(value.handle, mesh_info(mesh), [], [own]))
    return wrap(cls, spec, value)


def put_pieces(cls: type, spec: Spec, pieces: Sequence[torch.Tensor], copy: bool = True) -> Any:
    """A tensor made of local tensors, one per piece of ``spec``, in piece order; ``copy`` as for ``put``."""
    client = current_client()
    value = Value(client, client.new_handle())
    client.check_mesh(spec.mesh)
    client.emit(
        Put(value.handle, mesh_info(spec.mesh), list(spec.axes), [p.detach().clone() if copy else p.detach() for p in pieces])
    )
    return wrap(cls, spec, value)


def mesh_info(mesh: DeviceMesh) -> MeshInfo:
    """A mesh as it crosses the wire."""
    return MeshInfo(mesh.device_type, list(mesh.shape), list(mesh.ids))


def fetching(tensor: Any) -> Fetch:
    """The instruction that reads all pieces of a tensor."""
    return Fetch(tensor._value.handle, mesh_info(tensor._spec.mesh), list(tensor._spec.axes))


def fetch_pieces(tensor: Any) -> list[torch.Tensor]:
    """Copies of the tensor's distinct local tensors, in piece order; waits."""
    client = client_of(tensor)
    if tensor._value.group is not None:
        aliasing.refresh(tensor._value.group)
    return client.request(fetching(tensor), None)


def fetch_whole(tensor: Any) -> torch.Tensor:
    """A copy of the global value as a plain tensor; waits."""
    return fetch_async(tensor).get()


def fetch_async(tensor: Any) -> TensorFuture:
    """The global value as a future."""
    whole = replicated(tensor)
    if whole._value.group is not None:
        aliasing.refresh(whole._value.group)
    client = client_of(whole)
    return TensorFuture(client, client.send(fetching(whole)))
