"""What a step of a plan raises, and how it tells on what it worked."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor


class Poisoned(Exception):
    """An input of a plan is poison."""


class PeerRefused(Exception):
    """Other workers had nothing to give, for what they should have given has failed there.

    Attributes:
        peer: one of them.
    """

    def __init__(self, peers: Collection[int]) -> None:
        self.peer = min(peers)
        super().__init__(f"an operator failed before on worker {', '.join(map(str, sorted(peers)))}")


class StepFailed(Exception):
    """A step of a plan raised.

    Attributes:
        operator: the local operator, or the collective and the operator that needs it.
        device: logical device ids that the failing piece belongs to, with the device type.
        shapes: local shapes and dtypes of the tensors it worked on.
    """

    def __init__(self, operator: str, device: str, shapes: str) -> None:
        super().__init__(operator, device, shapes)
        self.operator, self.device, self.shapes = operator, device, shapes


def describe(tensors: Sequence[Any]) -> str:
    """Shapes and dtypes, for error texts."""
    shown = [f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors if isinstance(t, Tensor)]
    return ", ".join(shown) or "none"
