"""Operators of our own: what local steps of plans run beside PyTorch's. Workers have the functions, here are the schemas.

One of them is also issued by the client, and so has a meta kernel.
"""

from __future__ import annotations

import torch

_STEP = "Tensor query, Tensor pair, Tensor? mask, int[] columns, int[] blocks, str kernel, float? scale"
SCHEMAS = {
    "attend": "(Tensor q, Tensor k, Tensor v, Tensor? mask, str kernel, bool causal, float? scale) -> (Tensor, Tensor)",
    "attend_backward": "(Tensor grad, Tensor out, Tensor rows, Tensor q, Tensor k, Tensor v, Tensor? mask, str kernel, "
    "bool causal, float? scale) -> (Tensor, Tensor, Tensor)",
    "ring_start": "(Tensor query, Tensor pair, int width) -> (Tensor, Tensor, Tensor)",
    "ring_attend_": f"(Tensor(a!) total, Tensor(b!) top, Tensor(c!) weight, {_STEP}) -> ()",
    "ring_weighed": "(Tensor total, Tensor top, Tensor weight, Tensor best) -> Tensor",
    "ring_parted": "(Tensor both) -> (Tensor, Tensor)",
    "ring_end": "(Tensor total, Tensor top, Tensor weight, ScalarType dtype) -> (Tensor, Tensor)",
    "zeros": "(Tensor like, Tensor beside, ScalarType dtype) -> Tensor",
    "ring_backward_": f"(Tensor(a!) grad_query, Tensor(b!) grad_pair, Tensor grad, Tensor out, Tensor rows, {_STEP}) -> ()",
    "packed": "(Tensor out, Tensor rows) -> Tensor",
    "unpacked": "(Tensor both, ScalarType dtype) -> (Tensor, Tensor)",
    "ordered": "(Tensor x, int[] order) -> Tensor",
    "columns": "(Tensor x, int start, int end) -> Tensor",
    "summed": "(Tensor x, int[] counts) -> Tensor",
    "weight_gradient": "(Tensor grad, Tensor input) -> Tensor",
}
"""By name in the namespace ``dtorch``."""

_library = torch.library.Library("dtorch", "DEF")
for _name, _schema in SCHEMAS.items():
    _library.define(f"{_name}{_schema}")


def own(name: str) -> torch._ops.OpOverload:
    """The operator of a name of ``SCHEMAS``."""
    return getattr(torch.ops.dtorch, name).default


def _weight_gradient(grad: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    return grad.new_empty((grad.shape[-1], input.shape[-1]))


_library.impl("weight_gradient", _weight_gradient, "Meta")
