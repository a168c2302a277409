"""``load_state_dict(assign=True)`` puts the tensors of a state dict in a module's place: they come to lie as its own did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..core.spec import Spec
from ..tensor.tensor import Tensor
from .decide import join
from .hooks import settle_gradient

HANDLES = "_dtorch_assigned"
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
    setattr(module, HANDLES, [part.register_load_state_dict_post_hook(Assigned(places, owner)) for owner, part in parts])


class Assigned:
    """Hook after a module has loaded a state dict: its own tensors are split as before; the whole model's, tied."""

    def __init__(self, places: Places, owner: str) -> None:
        self.places, self.owner = places, owner

    def __call__(self, module: nn.Module, incompatible: Any) -> None:
        for table, name, tensor in _own(module):
            spec = self.places.specs.get(join(self.owner, name))
            if spec is None:
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
            owner, _, short = name.rpartition(".")
            table = next(t for t, n, _ in _own(root.get_submodule(owner)) if n == short)
            first = root.get_parameter(main) if isinstance(table[short], nn.Parameter) else root.get_buffer(main)
            if table[short] is not first and table[short].dtype == first.dtype and torch.equal(table[short], first):
                table[short] = first


def _own(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    for table in (module._parameters, module._buffers):
        yield from ((table, name, tensor) for name, tensor in table.items() if tensor is not None)


def _like(old: torch.Tensor, new: Tensor) -> torch.Tensor:
    return nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
