"""``Gradients``: what a step adds to ``.grad``, all of it or, when it fails, nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import Node


class Gradients:
    """Gradients of one step. While it runs, ``.grad`` holds its own only, and what was there before is kept."""

    def __init__(self) -> None:
        self.before: dict[Node, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def add(self, leaf: Node, gradient: torch.Tensor) -> None:
        """Add to the gradient of a leaf, given by the node that accumulates it; its hooks run as in PyTorch."""
        node: Any = leaf
        if leaf not in self.before:
            self.before[leaf] = node.variable, node.variable.grad
            node.variable.grad = None
        with torch.no_grad():
            node(gradient)

    def keep(self) -> None:
        """The step is done: add it to what was there."""
        with torch.no_grad():
            for variable, before in self.before.values():
                if before is not None:
                    variable.grad = before if variable.grad is None else before.add_(variable.grad)

    def undo(self) -> None:
        """The step failed: leave what was there."""
        for variable, before in self.before.values():
            variable.grad = before
