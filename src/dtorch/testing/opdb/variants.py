"""What is done with a sample: the operator forward, with gradients, in place, and into ``out=``; alike on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ... import Partial, Replicate, Tensor
from ...sharding.call import leaves, replace_leaves


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample of the database, its tensors apart.

    Attributes:
        tree: input, positional arguments and keyword arguments, with the database's own tensors in them.
        tensors: each distinct tensor, dense, in order.
        numbers: from the identity of a tensor in the tree to its number.
        differentiable: whether each tensor is one to differentiate by.
        process: picks what of a result has a definite gradient.
        broadcasts: whether the result is larger than the input, so that there is no in-place form.
    """

    tree: tuple[Any, Sequence[Any], dict[str, Any]]
    tensors: list[torch.Tensor]
    numbers: dict[int, int]
    differentiable: list[bool]
    process: Any
    broadcasts: bool

    def filled(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, Sequence[Any], dict[str, Any]]:
        """Input, arguments and keyword arguments with these tensors in place of the sample's."""
        return replace_leaves(self.tree, torch.Tensor, lambda t: tensors[self.numbers[id(t)]])


@dataclass(frozen=True, slots=True)
class Started:
    """A program that has run forward.

    Attributes:
        result: what is compared: the operator's result, and what it wrote.
        outs, wanted: tensors to differentiate, and by which; empty where there is nothing to differentiate.
    """

    result: Any
    outs: list[torch.Tensor]
    wanted: list[torch.Tensor]


def start(
    op: Any, variant: str, sample: Sample, tensors: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], seed: int
) -> Started:
    """Run a variant of an operator forward.

    Args:
        op: the database's entry.
        tensors: what stands for the sample's tensors; may be written.
        outs: what ``out=`` is given.
        seed: of the random numbers it may draw.
    """
    if variant in ("backward", "inplace_backward"):
        return _differentiable(op, variant, sample, tensors, seed)
    function = op.get_inplace() if variant == "inplace" else op
    given, args, kwargs = sample.filled(tensors)
    if variant == "out":
        kwargs = {**kwargs, "out": outs[0] if len(outs) == 1 else tuple(outs)}
    torch.default_generator.manual_seed(seed)
    with torch.no_grad():
        result = function(given, *args, **kwargs)
    return Started((result, given) if variant == "inplace" else (result, list(outs)) if variant == "out" else result, [], [])


def gradients(started: Started) -> list[torch.Tensor]:
    """Gradients, under fixed weights, of what a program gave; zeros where there is none."""
    weights = [_weight(t) for t in started.outs]
    found = torch.autograd.grad(started.outs, started.wanted, weights, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, started.wanted, strict=True)]


def _differentiable(op: Any, variant: str, sample: Sample, tensors: Sequence[torch.Tensor], seed: int) -> Started:
    roots = [t.detach().requires_grad_(on) for t, on in zip(tensors, sample.differentiable, strict=True)]
    given, args, kwargs = sample.filled(roots)
    function = op
    if variant == "inplace_backward":
        function, given = op.get_inplace(), given.clone()
    torch.default_generator.manual_seed(seed)
    with torch.enable_grad():
        result = function(given, *args, **kwargs)
        definite = sample.process(result)
    outs = [t for t in leaves(definite, torch.Tensor) if t.requires_grad]
    return Started(result, outs, [t for t in roots if t.requires_grad])


def _weight(like: torch.Tensor) -> torch.Tensor:
    """Weights that tell elements apart, placed like the tensor they weigh."""
    source = torch.Generator().manual_seed(2)
    plain = (torch.randint(-8, 9, like.shape, generator=source) / 8).to(like.dtype)
    if not isinstance(like, Tensor):
        return plain
    placements = [Replicate() if isinstance(p, Partial) else p for p in like.placements]
    return Tensor(plain, device_mesh=like.device_mesh, placements=placements)
