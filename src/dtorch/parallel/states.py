"""State that an optimizer loads, of plain tensors or from another mesh, comes to lie as its parameters do."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from ..core.placements import REPLICATE, Placements
from ..tensor.tensor import Tensor

SETTLED = "_dtorch_settled"
"""Where an optimizer keeps the state that was looked through last; loading makes a new one."""


def settle_state(optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
    """Bring state tensors to where their parameter lies; a hook before every step.

    ``load_state_dict`` leaves plain ones plain, and each step would then send them to the devices and read them back.
    """
    if getattr(optimizer, SETTLED, None) is optimizer.state:
        return
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, Tensor):
            for name, value in state.items():
                placements = _home(value, parameter)
                if placements is not None:
                    state[name] = Tensor(value, device_mesh=parameter.device_mesh, placements=placements)
    setattr(optimizer, SETTLED, optimizer.state)


def _home(value: Any, parameter: Tensor) -> Placements | None:
    """How a state tensor is to lie on its parameter's mesh: as that does, or whole where it is of another shape.

    None for what may stay: small plain tensors, and what lies there already.
    """
    away = isinstance(value, Tensor) and value.device_mesh is not parameter.device_mesh
    if not isinstance(value, torch.Tensor) or value.ndim == 0 or (isinstance(value, Tensor) and not away):
        return None
    if value.shape == parameter.shape:
        return parameter.placements
    return (REPLICATE,) * parameter.device_mesh.ndim if away else None
