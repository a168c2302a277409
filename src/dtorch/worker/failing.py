"""What a step of a plan raises, and how it tells on what it worked."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor

MOST_CHARACTERS = 16384
"""Of what an error says: the rest is left out, in the middle."""


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


def told(error: BaseException) -> tuple[str, str]:
    """What an error says and its traceback, as text that can travel: an error may be of the user's making, and say anything."""
    return _text(lambda: f"{type(error).__name__}: {error}", error), _text(
        lambda: "".join(traceback.format_exception(error)), error
    )


def _text(make: Callable[[], str], error: BaseException) -> str:
    try:
        text = make()
    except Exception as worse:
        text = f"{type(error).__name__}, whose text cannot be had, for that raises {type(worse).__name__}"
    text = text.encode(errors="backslashreplace").decode()
    half = MOST_CHARACTERS // 2
    return text if len(text) <= MOST_CHARACTERS else f"{text[:half]} ... ({len(text)} characters) ... {text[-half:]}"
