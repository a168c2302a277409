"""A batch cut into micro-batches, and what each weighs in the mean."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...core.errors import UsageError, four_parts
from ...core.placements import balanced
from ..hooks import LABEL_WORD

WHERE = "the call of the pipeline"
IGNORED = -100
"""The label that PyTorch's losses leave out."""

PLAIN = (type(None), bool, int, float, complex, str, bytes, slice, enum.Enum, torch.dtype, torch.device)
"""What every micro-batch may be given the same of."""

WHOLE = {"cache_position": None}
"""Keyword arguments of models whose length is not that of the batch even where it seems so -> their batch dim, None."""

Reduction = str | Callable[..., float]


@dataclass(frozen=True)
class MicroBatch:
    """Arguments of the model, and the ``target`` of the loss function, for some rows of the batch."""

    args: tuple
    kwargs: dict[str, Any]
    target: Any
    rows: int


@dataclass
class Cutter:
    """Cuts arguments along the batch.

    Attributes:
        batch: its length.
        dims: keyword -> batch dim of the tensors given so, or None where every micro-batch gets them whole; 0 for others.
        pieces: for inputs that want their gradient, what micro-batches were given instead, with the dim they were cut along.
    """

    batch: int
    dims: Mapping[str, int | None]
    pieces: dict[int, tuple[torch.Tensor, int | None, list[torch.Tensor]]] = field(default_factory=dict)

    def cut(self, args: tuple, kwargs: dict[str, Any], target: Any, start: int, rows: int) -> MicroBatch:
        """The arguments for some rows.

        Raises:
            UsageError: an argument that cannot be cut.
        """
        named = {k: self._part(k, v, start, rows, self.dims.get(k, 0)) for k, v in kwargs.items()}
        given = tuple(self._part(f"argument {i}", v, start, rows, 0) for i, v in enumerate(args))
        return MicroBatch(given, named, self._part("target", target, start, rows, 0), rows)

    def give_back(self) -> None:
        """Hand the inputs that want it their gradient, put together from those of the micro-batches."""
        for whole, dim, pieces in self.pieces.values():
            found = [p.grad for p in pieces if p.grad is not None]
            if not found:
                continue
            if dim is None:
                gradient = torch.stack(found).sum(0)
            else:
                gradient = torch.cat([torch.zeros_like(p) if p.grad is None else p.grad for p in pieces], dim)
            torch.autograd.backward([whole], [gradient])

    def _part(self, name: str, tree: Any, start: int, rows: int, dim: int | None) -> Any:
        if isinstance(tree, torch.Tensor):
            return self._rows(name, tree, start, rows, dim)
        if isinstance(tree, tuple | list):
            items = [self._part(name, item, start, rows, dim) for item in tree]
            return tree._make(items) if hasattr(tree, "_make") else type(tree)(items)
        if type(tree) is dict:
            return {k: self._part(name, v, start, rows, dim) for k, v in tree.items()}
        if isinstance(tree, PLAIN) or rows == self.batch:
            return tree
        raise UsageError(
            four_parts(
                f"{name} of type {type(tree).__name__}",
                "a batch is cut into micro-batches by the tensors in it, in tuples, lists and dicts",
                WHERE,
                "leave it out (use_cache=False for a cache), or give micro_batches=1",
            )
        )

    def _rows(self, name: str, tensor: torch.Tensor, start: int, rows: int, dim: int | None) -> torch.Tensor:
        along = dim if dim is not None and dim < tensor.ndim and tensor.shape[dim] == self.batch else None
        if along is None and dim and tensor.ndim:
            raise UsageError(
                four_parts(
                    f"{name} of shape {tuple(tensor.shape)} for a batch of {self.batch}",
                    f"batch_dims says that its dim {dim} is the batch",
                    WHERE,
                    "mend batch_dims, or the tensor",
                )
            )
        part = tensor if along is None else tensor.narrow(along, start, rows)
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return part
        leaf = part.detach().requires_grad_()
        self.pieces.setdefault(id(tensor), (tensor, along, []))[2].append(leaf)
        return leaf


def micro_batches(
    args: tuple, kwargs: dict[str, Any], target: Any, count: int, dims: Mapping[str, int | None]
) -> tuple[list[MicroBatch], Cutter]:
    """Cut a batch into ``count`` micro-batches, or as many as it has rows; the first ones are a row longer where it does not
    divide.

    Raises:
        UsageError: no batch to be found, or an argument that cannot be cut.
    """
    batch = _batch(args, kwargs, {**WHOLE, **dims})
    if batch is None and count > 1:
        raise UsageError(
            four_parts(
                "no tensor of one dim or more",
                "the batch is dim 0 of the first tensor given",
                WHERE,
                "give the model's inputs as tensors, or micro_batches=1",
            )
        )
    cutter = Cutter(batch or 0, {**WHOLE, **dims})
    start, parts = 0, []
    for rows in balanced(cutter.batch, max(1, min(count, cutter.batch))):
        parts.append(cutter.cut(args, kwargs, target, start, rows))
        start += rows
    return parts, cutter


def weights(parts: list[MicroBatch], model: nn.Module, reduction: Reduction, has_loss_fn: bool) -> list[float]:
    """What the loss of each micro-batch counts in that of the batch.

    Args:
        parts: the micro-batches.
        model: asked whether it shifts labels, as Hugging Face's causal models do.
        reduction: ``"mean"``, ``"sum"``, or a function of a micro-batch's arguments that counts what is averaged over.
        has_loss_fn: whether the loss is a function of a target.

    Raises:
        UsageError: labels that are partly left out by a model of which it is not known how it counts them.
    """
    if reduction == "sum" or (parts[0].kwargs.get(ITEMS) is not None and not callable(reduction)):
        return [1.0] * len(parts)
    counts = _counts(parts, model, reduction, has_loss_fn)
    total = sum(counts)
    return [n / total if total else 1 / len(parts) for n in counts]


def _batch(args: tuple, kwargs: dict[str, Any], dims: Mapping[str, int | None]) -> int | None:
    named = [(None, a) for a in args] + list(kwargs.items())
    for name, tree in named:
        dim = dims.get(name, 0) if name else 0
        for tensor in _tensors(tree):
            if dim is not None and tensor.ndim > dim:
                return tensor.shape[dim]
    return None


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    items = tree.values() if type(tree) is dict else tree if isinstance(tree, tuple | list) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def _counts(parts: list[MicroBatch], model: nn.Module, reduction: Reduction, has_loss_fn: bool) -> list[float]:
    """How many items the loss of each micro-batch is the mean of."""
    if callable(reduction):
        named = [p.kwargs if p.target is None else {**p.kwargs, "target": p.target} for p in parts]
        return [float(reduction(*p.args, **kwargs)) for p, kwargs in zip(parts, named, strict=True)]
    labels = [_labels(p, has_loss_fn) for p in parts]
    if not any(bool((t == IGNORED).any()) for some in labels for t in some):
        return [p.rows for p in parts]
    shifted = not has_loss_fn and _is(model, SHIFTED)
    if len(labels[0]) > 1 or not (shifted or has_loss_fn or _is(model, PER_LABEL)):
        raise UsageError(
            four_parts(
                f"labels of which some are {IGNORED}, for a {type(model).__name__}",
                "the loss of the batch is that of the micro-batches, weighted by how many labels each averages over",
                "pipeline(model, micro_batches, reduction='mean')",
                "give reduction=, a function of the arguments that counts those labels, or 'sum' for a loss that is a sum",
            )
        )
    return [float(((t[..., 1:] if shifted else t) != IGNORED).sum()) for (t,) in labels]


def _is(model: nn.Module, kinds: tuple[str, ...]) -> bool:
    return getattr(model, "loss_type", None) in kinds or type(model).__name__ in kinds


def _labels(part: MicroBatch, has_loss_fn: bool) -> list[torch.Tensor]:
    """What may hold labels to leave out: tensors of integers."""
    given = [part.target] if has_loss_fn else [v for k, v in part.kwargs.items() if LABEL_WORD in k]
    return [t for t in _tensors(given) if t.ndim and not t.is_floating_point() and t.dtype is not torch.bool]


ITEMS = "num_items_in_batch"
"""By this keyword a Hugging Face model is told what to divide by, so that losses add up."""

SHIFTED = ("ForCausalLM", "GPT2LMHeadModel")
"""Hugging Face models, by ``loss_type`` or class, that predict the next token: the first label of each row is left out."""

PER_LABEL = ("ForMaskedLM", "ForTokenClassification", "ForSequenceClassification")
"""And those whose loss is the mean over the labels as they are given."""
