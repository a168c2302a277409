"""Distances between rows, sums of products of three, and counts by value."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..call import OpCall
from ..labels import Labels
from ..rule import Rule
from .compose import letters, tensor_names

_aten = torch.ops.aten
_BATCH = "abcdefgh"
MANY_ROWS = 25
"""From more rows than these on PyTorch takes Euclidean distances by a product."""


def _dims(shape: Sequence[int], full: Sequence[int], last: Sequence[str | None]) -> list[str | None]:
    """Labels of batches of matrices; None where a batch dim is stretched."""
    batch = shape[:-2]
    skip = len(full) - len(batch)
    return [*(_BATCH[skip + d] if n == full[skip + d] else None for d, n in enumerate(batch)), *last]


def distances(call: OpCall) -> Labels:
    """``cdist``: rows of either side and batches may be split. The way to compute it is chosen by the global sizes."""
    first, second = (s.shape for s in call.specs)
    full = call.outs[0].shape[:-2]
    p, mode = call.arg("p"), call.arg("compute_mode", 0)
    if mode == 0:
        mode = 1 if p == 2 and (first[-2] > MANY_ROWS or second[-2] > MANY_ROWS) else 2
    inputs = [_dims(first, full, ["p", None]), _dims(second, full, ["r", None])]
    instead = (_aten._cdist_forward.default, (p, mode))
    return Labels(inputs, [_dims(call.outs[0].shape, full, ["p", "r"])], instead=instead)


def distance_gradients(call: OpCall) -> Labels:
    """The first side's gradient is a sum over the rows of the second. Of an empty piece it would lack the other's batches."""
    last: dict[str, list[str | None]] = {"grad": ["p", "r"], "cdist": ["p", "r"], "x1": ["p", None], "x2": ["r", None]}
    full = call.arg("grad").shape[:-2]
    inputs = [_dims(s.shape, full, last[n]) for n, s in zip(tensor_names(call), call.specs, strict=True)]
    nonempty = frozenset(("p", "r", *_BATCH))
    return Labels(inputs, [_dims(call.outs[0].shape, full, ["p", None])], {"r": "sum"}, nonempty=nonempty)


def trilinear(call: OpCall) -> Labels:
    """The product of three tensors, each spread over dims that it lacks, summed over some dims."""
    ndim = len(call.specs[0].shape) + len(call.arg("expand1"))
    names = letters(ndim)
    inputs = [
        [c for d, c in enumerate(names) if d not in call.arg(f"expand{number}")] for number in range(1, len(call.specs) + 1)
    ]
    summed = [d % ndim for d in call.arg("sumdim")]
    kept = [c for d, c in enumerate(names) if d not in summed]
    return Labels(inputs, [kept], {c: "sum" for d, c in enumerate(names) if d in summed and c is not None})


def counts(call: OpCall) -> Labels:
    """``histc`` and ``histogram``: counts of pieces add up where the bounds are given; else the extremes must be seen."""
    bounds = call.arg("range") or (call.arg("min", 0), call.arg("max", 0))
    given = bounds[0] != bounds[1] and not call.arg("density")
    dims = letters(len(call.specs[0].shape)) if given else [None] * len(call.specs[0].shape)
    outs: list[list[None]] = [[None]] * len(call.outs)
    labels = [c for c in dims if c is not None]
    return Labels([dims] * len(call.specs), outs, dict.fromkeys(labels, "sum"), alike={c: [1] for c in labels})


TABLE = {
    "_cdist_forward": Rule(distances),
    "_cdist_backward": Rule(distance_gradients),
    "_trilinear": Rule(trilinear),
    "histc": Rule(counts),
    "histogram.bin_ct": Rule(counts),
}
