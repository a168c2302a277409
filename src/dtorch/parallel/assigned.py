"""What ``load_state_dict`` is given comes to lie as a module's own tensors do.

Global tensors may come from another mesh. ``load_state_dict(assign=True)`` puts what it is given in the place of the own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..core.spec import Spec
from ..tensor.tensor import Tensor
from .decide import join
from .hooks import HANDLES, settle_gradient
from .layout import ATTRIBUTE

ASSIGNED = "_dtorch_assigned"
"""Where a module keeps the handles of these hooks, to take them away when it is distributed anew."""


@dataclass(frozen=True)
class Places:
    """Where tensors lie by qualified name, and the first name of each that has several."""

    specs: Mapping[str, Spec]
    tied: Mapping[str, str]

    def __deepcopy__(self, memo: dict) -> Places:
        return self


def follow_assignments(module: nn.Module, places: Places) -> None:
    """Hang the hooks: on every module, for each may be given a state dict of its own."""
    parts = list(module.named_modules())
    handles = [part.register_load_state_dict_pre_hook(bring_over) for _, part in parts]
    handles += [part.register_load_state_dict_post_hook(Assigned(places, owner)) for owner, part in parts]
    setattr(module, ASSIGNED, handles)


def let_go(module: nn.Module) -> None:
    """Take away what was hung and noted when the module, or a part of it, was distributed before."""
    for part in module.modules():
        for handle in (*getattr(part, HANDLES, ()), *getattr(part, ASSIGNED, ())):
            handle.remove()
        for name in (HANDLES, ASSIGNED, ATTRIBUTE):
            part.__dict__.pop(name, None)


def bring_over(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Hook before a module loads a state dict: global tensors of another mesh come onto that of the module's own ones."""
    for _, name, own in _own(module):
        given = state.get(prefix + name)
        if not isinstance(own, Tensor) or not isinstance(given, Tensor) or given.device_mesh is own.device_mesh:
            continue
        if given.shape == own.shape:
            state[prefix + name] = Tensor(given.detach(), device_mesh=own.device_mesh, placements=own.placements)


class Assigned:
    """Hook after a module has loaded a state dict: its own tensors are split as before; the whole model's, tied."""

    def __init__(self, places: Places, owner: str) -> None:
        self.places, self.owner = places, owner

    def __call__(self, module: nn.Module, incompatible: Any) -> None:
        for table, name, tensor in _own(module):
            spec = self.places.specs.get(join(self.owner, name))
            if spec is None or spec.shape != tensor.shape:
                # It was put there later.
                continue
            lies = isinstance(tensor, Tensor) and (tensor.device_mesh, tensor.placements) == (spec.mesh, spec.placements)
            if not lies:
                table[name] = _like(tensor, Tensor(tensor.detach(), device_mesh=spec.mesh, placements=spec.placements))
            if tensor.requires_grad and not table[name]._post_accumulate_grad_hooks:
                table[name].register_post_accumulate_grad_hook(settle_gradient)
        if not self.owner:
            self._tie(module)

    def _tie(self, root: nn.Module) -> None:
        """What was one tensor is one again, where the state dict held the same under each name."""
        for name, main in self.places.tied.items():
            found, first = _found(root, name), _found(root, main)
            if found is None or first is None or found[1] is first[1] or found[1].dtype != first[1].dtype:
                continue
            if torch.equal(found[1], first[1]):
                found[0][name.rpartition(".")[2]] = first[1]


def _found(root: nn.Module, name: str) -> tuple[dict[str, Any], torch.Tensor] | None:
    """A parameter or buffer of that name with the table that holds it; None where it is there no more."""
    owner, _, short = name.rpartition(".")
    part = dict(root.named_modules(remove_duplicate=False)).get(owner)
    return next(((t, tensor) for t, n, tensor in _own(part) if n == short), None) if part is not None else None


def _own(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    for table in (module._parameters, module._buffers):
        yield from ((table, name, tensor) for name, tensor in table.items() if tensor is not None)


def _like(old: torch.Tensor, new: Tensor) -> torch.Tensor:
    return nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
