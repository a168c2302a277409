"""``dtorch.nn``: modules whose weights are split over an axis of a mesh, beside everything of ``torch.nn``.

Each is the module of ``torch.nn`` that its name says, with the same values under the same seed; only where the weights
lie differs. So they mix with any other module, and a mesh without the axis makes them ordinary ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..core.mesh import DeviceMesh
from ..core.placements import REPLICATE, Placement, Shard
from ..tensor.defaults import default_mesh
from ..tensor.tensor import Tensor
from .axes import TENSOR, placements_on
from .hooks import settle_gradient

__all__ = [
    "ColumnParallelLinear",
    "ColumnParallelLinearWithReplicateOutput",
    "RowParallelLinear",
    "RowParallelLinearWithReplicateOutput",
    "VocabParallelEmbedding",
]


def __getattr__(name: str) -> Any:
    """Everything else is ``torch.nn``'s."""
    return getattr(nn, name)


class _SplitLinear(nn.Linear):
    """A linear layer that splits its parameters over an axis as ``split`` says."""

    split: Mapping[str, Placement] = {}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        dtype: torch.dtype | None = None,
        device_mesh: DeviceMesh | None = None,
        tp_dim: str = TENSOR,
    ) -> None:
        super().__init__(in_features, out_features, bias, dtype=dtype)
        self.tp_dim = tp_dim
        _distribute(self, device_mesh, tp_dim, dict(self.split))


class ColumnParallelLinear(_SplitLinear):
    """A linear layer whose output features are split: (..., in) replicated to (..., out) split on its last dim.

    Args:
        in_features, out_features, bias, dtype: as in ``torch.nn.Linear``; sizes need not divide.
        device_mesh: where it lives; the default mesh when omitted.
        tp_dim: the mesh axis to split over.
    """

    split = {"weight": Shard(0), "bias": Shard(0)}


class ColumnParallelLinearWithReplicateOutput(ColumnParallelLinear):
    """``ColumnParallelLinear`` whose output is gathered: (..., in) to (..., out), both replicated over the axis."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The product, whole on every device of the axis."""
        return _whole(super().forward(input), self.tp_dim)


class RowParallelLinear(_SplitLinear):
    """A linear layer whose input features are split: (..., in) split on its last dim to (..., out) as partial sums.

    Arguments as ``ColumnParallelLinear``'s. A bias is whole on every device; adding it adds up the partial sums.
    """

    split = {"weight": Shard(1)}


class RowParallelLinearWithReplicateOutput(RowParallelLinear):
    """``RowParallelLinear`` whose partial sums are added up: (..., in) to (..., out), replicated over the axis."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The product, whole on every device of the axis."""
        return _whole(super().forward(input), self.tp_dim)


class VocabParallelEmbedding(nn.Embedding):
    """An embedding whose vocabulary is split: indices (...) to (..., features), replicated over the axis.

    Args:
        num_embeddings, embedding_dim, dtype, options: as in ``torch.nn.Embedding``.
        device_mesh: where it lives; the default mesh when omitted.
        tp_dim: the mesh axis to split over.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        dtype: torch.dtype | None = None,
        device_mesh: DeviceMesh | None = None,
        tp_dim: str = TENSOR,
        **options: Any,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, dtype=dtype, **options)
        self.tp_dim = tp_dim
        _distribute(self, device_mesh, tp_dim, {"weight": Shard(0)})

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The rows asked for, whole on every device of the axis."""
        return _whole(super().forward(input), self.tp_dim)


def _distribute(module: nn.Module, mesh: DeviceMesh | None, axis: str, split: dict[str, Placement]) -> None:
    """Put a fresh module's parameters on a mesh, those named split over an axis."""
    home = mesh or default_mesh()
    for name, plain in list(module.named_parameters(recurse=False)):
        by_axis = {axis: split[name]} if name in split else {}
        placed = nn.Parameter(Tensor(plain.detach(), device_mesh=home, placements=placements_on(home, by_axis)))
        placed.register_post_accumulate_grad_hook(settle_gradient)
        setattr(module, name, placed)


def _whole(output: torch.Tensor, axis: str) -> torch.Tensor:
    assert isinstance(output, Tensor)
    return output.redistribute_by_dict({axis: REPLICATE})
