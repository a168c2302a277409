"""``Pass``: one micro-batch on its way through the stages, forward and back, a stage at a time.

Forward, the model's function stops at the entrance of each stage, where the autograd graph is cut: tensors of earlier
stages are replaced by leaves. Backward through a stage is a call of ``torch.autograd.grad`` that ends at parameters and at
those leaves, whose gradients wait until the turn of the stage that computed them comes.

A tensor may reach a later stage by other ways than an entrance, as the router logits of all layers reach the loss of a
mixture of experts. PyTorch numbers nodes as they come, so a node of an earlier stage is known by its number, and backward
ends there too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from ...tensor.tensor import Tensor
from ..hooks import Moves
from .ambient import Ambient, Own, without_autocast
from .coroutine import Coroutine
from .gradients import Gradients

_functions: Any = torch._C._functions
AccumulateGrad = _functions.AccumulateGrad

Edge = tuple[Node, int]
"""A node of the autograd graph, and which of its outputs."""

Edges = dict[Edge, None]
"""A set of them, in order."""


class Pass:
    """A micro-batch's passes.

    Args:
        body: runs the model's whole forward on the micro-batch. Given this pass, to leave ``output`` and the loss there.
        moves: of the model.
        ambient: the modes to run it under.
        own: its random numbers and default meshes.
        gradients: where gradients of parameters go.
    """

    def __init__(self, body: Callable[[Pass], None], moves: Moves, ambient: Ambient, own: Own, gradients: Gradients) -> None:
        self.coroutine = Coroutine(lambda: ambient.run(lambda: body(self)))
        self.output: Any = None
        self._moves, self._own, self._gradients = moves, own, gradients
        self._kept: tuple[int, dict] = (0, {})
        # The stage that runs, the one to run next, and the number of the first node of each.
        self._stage, self._next = 0, 0
        self._starts = [0]
        # Leaves that stand for tensors of earlier stages, by the nodes that would accumulate their gradients, and the stage
        # that each was made for.
        self._cuts: dict[Node, tuple[Edge, int]] = {}
        self._waiting: dict[Edge, torch.Tensor] = {}
        # A node does not own those written in Python that it is found by; these do.
        self._owners: list[GradientEdge] = []

    def forward(self, stage: int) -> None:
        """Go on through a stage. Nothing happens where the model has none of its modules to call."""
        if self._next == stage and not self.coroutine.done:
            with self._in_place():
                self.coroutine.resume()

    def backward(self, stage: int) -> None:
        """Go back through a stage: its parameters' gradients are added up, those of its inputs wait for earlier stages."""
        roots = {edge: self._waiting.pop(edge) for edge in list(self._waiting) if self._stage_of(edge[0]) == stage}
        leaves, inputs, _ = self._ends(roots, stage)
        beyond = self._ends(inputs, 0)[2]
        whole = any(node in beyond for node, _ in (*leaves, *inputs))
        if whole:
            # PyTorch goes on at an earlier stage's node if anything asked for lies beyond it, as a tied weight does. So that
            # stage's part of this gradient is computed here, and its own turn adds the rest.
            leaves, inputs, _ = self._ends(roots, 0)
        if leaves or inputs:
            edges = [*leaves, *inputs]
            with without_autocast():
                found = torch.autograd.grad(
                    _edges(roots), _edges(edges), list(roots.values()), retain_graph=whole, allow_unused=True
                )
            for edge, gradient in zip(edges, found, strict=True):
                if gradient is not None:
                    self._pass_on(edge, gradient)
        self._cuts = {node: cut for node, cut in self._cuts.items() if cut[1] < stage}
        if not self._waiting:
            self._owners.clear()

    def close(self) -> None:
        """End the forward pass where it stopped."""
        with self._in_place():
            self.coroutine.close()

    def begin_backward(self, loss: torch.Tensor, gradient: torch.Tensor) -> None:
        """The loss is computed, and its gradient is this."""
        self._wait(self._edge_of(loss), gradient)

    def approach(self, stage: int) -> None:
        """See ``Passing``."""
        if stage > self._stage:
            self._starts += [torch.autograd._get_sequence_nr()] * (stage - self._next)
            self._next = stage

    def cut(self, tensor: Tensor) -> Tensor:
        """See ``Passing``."""
        node = tensor.grad_fn
        if node is None or not torch.is_grad_enabled() or self._stage_of(node) >= self._next:
            return tensor
        leaf: Any = tensor.detach().requires_grad_()
        self._cuts[get_gradient_edge(leaf).node] = self._edge_of(tensor), self._next
        return leaf

    def arrive(self) -> None:
        """See ``Passing``."""
        if self._next > self._stage:
            self.coroutine.pause()
            self._stage = self._next

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """What the process has once is this pass's inside."""
        moves = self._moves
        outer = moves.passing, moves.depth, moves.made
        with self._own.in_place():
            moves.passing, (moves.depth, moves.made) = self, self._kept
            try:
                yield
            finally:
                self._kept = moves.depth, moves.made
                moves.passing, moves.depth, moves.made = outer

    def _stage_of(self, node: Node) -> int:
        return bisect_right(self._starts, node._sequence_nr()) - 1

    def _edge_of(self, tensor: torch.Tensor) -> Edge:
        edge = get_gradient_edge(tensor)
        self._owners.append(edge)
        return edge.node, edge.output_nr

    def _pass_on(self, edge: Edge, gradient: torch.Tensor) -> None:
        node = edge[0]
        if node in self._cuts:
            self._wait(self._cuts[node][0], gradient)
        elif isinstance(node, AccumulateGrad):
            self._gradients.add(node, gradient)
        else:
            self._wait(edge, gradient)

    def _wait(self, edge: Edge, gradient: torch.Tensor) -> None:
        held = self._waiting.get(edge)
        self._waiting[edge] = gradient if held is None else held + gradient

    def _ends(self, roots: Iterable[Edge], stage: int) -> tuple[Edges, Edges, set[Node]]:
        """Where a stage's part of the graph ends: at leaves, and at nodes of earlier stages. And what is met on the way.

        The part of the stages after it, as far as it was not cut off, counts as its own.
        """
        leaves: Edges = {}
        inputs: Edges = {}
        stack = list({node: None for node, _ in roots})
        seen, met = set(stack), set()
        while stack:
            for node, output in stack.pop().next_functions:
                if node is None:
                    continue
                met.add(node)
                if isinstance(node, AccumulateGrad):
                    leaves[node, output] = None
                elif self._stage_of(node) < stage:
                    inputs[node, output] = None
                elif node not in seen:
                    seen.add(node)
                    stack.append(node)
        return leaves, inputs, met


def _edges(edges: Any) -> list[GradientEdge]:
    return [GradientEdge(node, output) for node, output in edges]
