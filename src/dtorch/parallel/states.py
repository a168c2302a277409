"""State that an optimizer loads of plain tensors comes to lie as its parameters do."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from ..tensor.tensor import Tensor

SETTLED = "_dtorch_settled"
"""Where an optimizer keeps the state that was looked through last; loading makes a new one."""


def settle_state(optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
    """Split plain state tensors that are as large as their parameter on its mesh; a hook before every step.

    ``load_state_dict`` leaves them plain, and each step would then send them to the devices and read them back.
    """
    if getattr(optimizer, SETTLED, None) is optimizer.state:
        return
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, Tensor):
            for name, value in state.items():
                if _is_like(value, parameter):
                    state[name] = Tensor(value, device_mesh=parameter.device_mesh, placements=parameter.placements)
    setattr(optimizer, SETTLED, optimizer.state)


def _is_like(value: Any, parameter: Tensor) -> bool:
    plain = isinstance(value, torch.Tensor) and not isinstance(value, Tensor)
    return plain and value.ndim > 0 and value.shape == parameter.shape
