"""``fully_shard``: the axis ``fsdp`` for a module whose parameters lie on a mesh already."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

from torch import nn

from ..core.errors import UsageError, four_parts
from ..core.placements import Shard
from ..tensor.tensor import Tensor
from .assigned import Places, follow_assignments, let_go
from .axes import SHARDED, placements_on, size_of
from .decide import free_dim
from .fsdp import Sharding, check_zero
from .hooks import HANDLES, settle_gradient
from .layout import layout_of

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def fully_shard(module: AnyModule, *, zero: int = 3) -> AnyModule:
    """Split a module's parameters over the axis ``fsdp`` of their meshes, in place, and gather them layer by layer.

    For modules written with ``dtorch.nn``, or built inside ``use_mesh``; ``parallelize`` does it by itself. How parameters
    lie over other axes stays. A parameter is split along its longest dim that no other axis splits. Gradients, of every
    parameter and on any mesh, come to lie as their parameters do as part of the backward pass.

    Args:
        module: its parameters are global tensors, on one mesh or on those of pipeline stages.
        zero: as for ``parallelize``.

    Returns:
        The module itself.

    Raises:
        UsageError: a parameter that is no global tensor, a ``zero`` that is no level, or a module that was parallelized.
    """
    check_zero(zero)
    _check(module)
    placed: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, old in part._parameters.items():
            if old is not None:
                if id(old) not in placed:
                    new = _sharded(old, zero)
                    placed[id(old)] = placed[id(new)] = new
                part._parameters[name] = placed[id(old)]
    let_go(module)
    named: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
    specs = {name: p._spec for name, p in named.items()}
    setattr(module, HANDLES, Sharding(zero).install(module, specs))
    first = {id(p): name for name, p in reversed(named.items())}
    follow_assignments(module, Places(specs, {name: first[id(p)] for name, p in named.items() if first[id(p)] != name}))
    return module


def _sharded(old: Any, zero: int) -> nn.Parameter:
    """A parameter in the place of another; tied ones stay one."""
    mesh = old.device_mesh
    by_axis = dict(zip(mesh.axis_names(), old.placements, strict=True))
    others = {axis: p for axis, p in by_axis.items() if axis != SHARDED}
    dim = free_dim(old.shape, others, size_of(mesh, SHARDED))
    placements = placements_on(mesh, others if dim is None else {**others, SHARDED: Shard(dim)})
    new = nn.Parameter(old.detach().redistribute(placements=placements), old.requires_grad)
    if old.requires_grad:
        new.register_post_accumulate_grad_hook(partial(settle_gradient, whole=SHARDED) if zero == 1 else settle_gradient)
    return new


def _check(module: nn.Module) -> None:
    plain = [name for name, p in module.named_parameters() if not isinstance(p, Tensor)]
    if plain or layout_of(module) is not None:
        raise UsageError(
            four_parts(
                f"{type(module).__name__} with plain parameters {plain}" if plain else "a module that was parallelized",
                "fully_shard takes a module whose parameters you have put on a mesh yourself",
                "dtorch.nn.fully_shard(module)",
                "build it inside `with dtorch.use_mesh(mesh):`, or use dtorch.parallelize(module, mesh) alone",
            )
        )
