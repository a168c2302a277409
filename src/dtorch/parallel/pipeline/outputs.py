"""What a model gave for each micro-batch, put together; and where the loss is in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...core.errors import UsageError, four_parts
from .batch import PLAIN


def find_loss(output: Any) -> torch.Tensor:
    """The loss in what a model returns: ``output.loss``, ``output["loss"]``, the first of a tuple, or the output itself.

    Raises:
        UsageError: there is no such number.
    """
    loss = output
    if isinstance(output, dict):
        loss = output.get("loss")
    elif hasattr(output, "loss"):
        loss = output.loss
    elif isinstance(output, tuple | list) and output:
        loss = output[0]
    if isinstance(loss, torch.Tensor) and loss.ndim == 0 and loss.requires_grad:
        return loss
    raise UsageError(
        four_parts(
            f"an output of type {type(output).__name__} without a loss",
            "a step goes back from a loss, a tensor without dims that depends on parameters",
            "pipe.step(...)",
            "give labels, so that the model computes one, or pipeline(..., loss_fn=...) and target=",
        )
    )


def detached(output: Any) -> Any:
    """The same output outside of autograd."""
    return _joined([output], lambda tensors: tensors[0].detach())


def put_together(outputs: Sequence[Any], rows: Sequence[int], weights: Sequence[float]) -> Any:
    """One output for the batch: tensors are joined along dim 0, numbers averaged by ``weights``. What is neither, a cache
    for example, becomes a list of one item for each micro-batch.

    Raises:
        UsageError: tensors whose dim 0 does not go by the rows.
    """
    return outputs[0] if len(outputs) == 1 else _joined(outputs, lambda tensors: _join(tensors, rows, weights))


def weighted_sum(numbers: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """The sum of numbers times weights. A weight of zero leaves its number out, even one that is not a number."""
    terms = [n * w for n, w in zip(numbers, weights, strict=True) if w]
    return torch.stack(terms).sum() if len(terms) > 1 else terms[0]


def _join(tensors: Sequence[torch.Tensor], rows: Sequence[int], weights: Sequence[float]) -> torch.Tensor:
    if all(t.ndim == 0 for t in tensors):
        return weighted_sum(tensors, weights) if tensors[0].is_floating_point() else torch.stack(list(tensors))
    each = tensors[0].shape[0] // rows[0] if tensors[0].ndim else 0
    if each and all(t.ndim and t.shape[0] == each * n for t, n in zip(tensors, rows, strict=True)):
        return torch.cat(list(tensors), 0)
    raise UsageError(
        four_parts(
            f"outputs of shapes {[tuple(t.shape) for t in tensors]} for micro-batches of {list(rows)} rows",
            "outputs are joined along dim 0, the batch",
            "what the pipeline's model returns",
            "let the model return the batch first, or leave this output out",
        )
    )


def _joined(trees: Sequence[Any], join: Callable[[list[torch.Tensor]], torch.Tensor]) -> Any:
    """Trees of one form with their tensors joined; a list of the trees where they are of several forms."""
    first = trees[0]
    if isinstance(first, torch.Tensor) and all(isinstance(t, torch.Tensor) for t in trees):
        return join(list(trees))
    if any(type(t) is not type(first) for t in trees):
        return list(trees)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [f.name for f in dataclasses.fields(first) if f.init]
        return dataclasses.replace(first, **{n: _joined([getattr(t, n) for t in trees], join) for n in names})
    if isinstance(first, dict) and all(t.keys() == first.keys() for t in trees):
        return type(first)((k, _joined([t[k] for t in trees], join)) for k in first)
    if isinstance(first, tuple | list) and all(len(t) == len(first) for t in trees):
        items = [_joined(list(parts), join) for parts in zip(*trees, strict=True)]
        return first._make(items) if hasattr(first, "_make") else type(first)(items)
    same = len(trees) == 1 or (isinstance(first, PLAIN) and all(t == first for t in trees))
    return first if same else list(trees)
