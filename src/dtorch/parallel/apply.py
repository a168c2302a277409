"""``parallelize``: distribute a module over a mesh, in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..core.errors import UsageError, four_parts
from ..core.mesh import DeviceMesh
from ..core.spec import Spec
from ..tensor.construct import distribute
from ..tensor.tensor import Tensor
from .assigned import Places, follow_assignments, let_go
from .axes import PIPELINE, SHARDED, check_axes, size_of
from .decide import decide, join
from .fsdp import LEVELS, check_zero
from .hooks import install, settle_gradient
from .layout import ATTRIBUTE, Layout
from .plan import Plan
from .sources import PlanArgument, read_plan
from .stages import assign_stages

Settle = Callable[[torch.Tensor], None]
AnyModule = TypeVar("AnyModule", bound=nn.Module)

Make = Callable[[str, torch.Tensor, Spec], Tensor]


def parallelize(
    module: AnyModule,
    mesh: DeviceMesh,
    plan: PlanArgument = None,
    *,
    sp: bool = False,
    zero: int = 3,
    virtual_stages: int = 1,
) -> AnyModule:
    """Distribute a module's parameters and buffers over a mesh, in place.

    Afterwards the module is called as before, with plain tensors or global ones; its outputs are global tensors. An
    axis ``dp`` splits the batch, ``fsdp`` the batch and every weight between its uses, ``tp`` splits weights, ``pp`` splits
    layers into stages, each on a mesh of its own, ``ulysses_cp`` and ``ring_cp`` split the sequence, ``ep`` splits the
    batch and spreads experts.
    Attention heads are never cut: where their number does not divide, some devices have more. Tied weights stay one
    parameter. ``describe(module)`` tells what was done.

    Args:
        module: a decoder-only Hugging Face model or any ``torch.nn.Module``.
        mesh: a mesh whose axes are named as above, any of them, in any order; or a single device.
        plan: a ``Plan``, or a dict from patterns of names (``*`` stands for anything) of parameters or modules to choices. A
            choice is a tensor-parallel style such as ``"colwise"``, a dict from axis name to placement, a list of placements,
            one per axis other than ``pp``, or a dict of ``"weights"``, ``"inputs"`` and ``"outputs"``. What it does not name
            is replicated. When omitted, ``plan_of(module)``; to change parts of that, ``plan_of(module).override(...)``.
        sp: split norms and residuals between tensor-parallel regions along the sequence.
        zero: what an axis ``fsdp`` splits: 3 weights, gradients and optimizer state, each layer's weights being gathered
            when it runs and let go of after; 2 keeps gathered weights until they change; 1 keeps gradients whole too.
        virtual_stages: stages on each device along ``pp``, for interleaved pipelines: stage ``k`` of ``pp * virtual_stages``
            lies on device ``k % pp``.

    Returns:
        The module itself.

    Raises:
        UsageError: an axis, style, name or ``zero`` that is not understood, more stages than layers, or weights not loaded
            yet.
        PlacementError: placements that do not fit a weight.
    """
    check_axes(mesh)
    check_zero(zero)
    _check_module(module)
    settle(module, *lay_out(module, mesh, plan, sp, zero, virtual_stages), lambda _, old, spec: _adopted(old, spec), zero)
    return module


def lay_out(
    module: nn.Module, mesh: DeviceMesh, plan: PlanArgument, sp: bool = False, zero: int = 3, virtual_stages: int = 1
) -> tuple[Layout, Plan]:
    """What ``parallelize`` would do, and by which rows; the module is only looked at, and may be without data.

    Raises:
        UsageError, PlacementError: see ``parallelize``.
    """
    check_axes(mesh)
    rows = read_plan(module, mesh, plan, sp)
    layout = decide(module, mesh, assign_stages(module, size_of(mesh, PIPELINE), virtual_stages), rows)
    if size_of(mesh, SHARDED) > 1:
        layout = replace(layout, remarks=(*layout.remarks, LEVELS[zero]))
    return layout, rows


def settle(module: nn.Module, layout: Layout, rows: Plan, make: Make, zero: int = 3) -> None:
    """Put a module's weights where a layout says, and hang its hooks.

    Args:
        make: the global tensor for a name, of what stands there now, under a spec.
        zero: see ``parallelize``.
    """
    let_go(module)
    _place(module, layout, make, partial(settle_gradient, whole=SHARDED) if zero == 1 else settle_gradient)
    install(module, layout, rows, zero)
    follow_assignments(module, Places(layout.specs, layout.tied))
    setattr(module, ATTRIBUTE, layout)


def _check_module(module: nn.Module) -> None:
    if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule):
        kind = f"class {module.__name__}" if isinstance(module, type) else type(module).__name__
        raise UsageError(
            four_parts(
                f"{kind} for a module",
                "what is distributed is a torch.nn.Module, whose forward is Python",
                "parallelize(module, mesh)",
                "give the module itself, before it is scripted; of a class, make one first",
            )
        )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor) or tensor.is_meta:
            raise UsageError(
                four_parts(
                    f"{name} without data",
                    "parallelize distributes the weights a module has",
                    "parallelize(module, mesh)",
                    "load or initialise the module first, or use dtorch.load_pretrained(module, path, mesh)",
                )
            )


def _place(module: nn.Module, layout: Layout, make: Make, settle: Settle) -> None:
    """Replace every parameter and buffer by a global one, letting go of the old one at once."""
    placed: set[int] = set()
    shared: dict[str, torch.Tensor] = {}
    for owner, part in module.named_modules(remove_duplicate=False):
        for table in (part._parameters, part._buffers):
            for name, old in table.items():
                # A module that stands under two names comes by twice.
                if old is None or id(old) in placed:
                    continue
                full = join(owner, name)
                main = layout.tied.get(full, full)
                new = shared[main] if main in shared else _global(full, old, layout.specs[full], make, settle)
                if main in layout.tied.values():
                    shared[main] = new
                table[name] = new
                placed.add(id(new))


def _global(name: str, old: torch.Tensor, spec: Spec, make: Make, settle: Settle) -> torch.Tensor:
    """A parameter or buffer on its mesh; ``settle`` brings a parameter's gradient where it belongs."""
    new = make(name, old.detach(), spec)
    if not isinstance(old, nn.Parameter):
        return new
    parameter = nn.Parameter(new, old.requires_grad)
    if old.grad is not None:
        parameter.grad = _adopted(old.grad, spec)
    if old.requires_grad:
        parameter.register_post_accumulate_grad_hook(settle)
    return parameter


def _adopted(data: torch.Tensor, spec: Spec) -> Tensor:
    """A tensor on its mesh; a plain one's memory is taken over where it can be, for the module gives it up."""
    if isinstance(data, Tensor) or data.is_inference():
        return Tensor(data, device_mesh=spec.mesh, placements=spec.placements)
    return distribute(Tensor, data, spec.mesh, spec.placements, copy=False)
