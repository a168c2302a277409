"""``dtorch.nn``: modules whose weights are split over an axis of a mesh, beside everything of ``torch.nn``.

Each is the module of ``torch.nn`` that its name says, with the same values under the same seed; only where the weights
lie differs. So they mix with any other module, and a mesh without the axis makes them ordinary ones.

What is communicated follows from how weights and inputs lie. Two methods say how inputs and outputs shall lie, and may be
overridden: ``redistribute_input`` and ``redistribute_output``. Their backward is the reverse redistribution.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..core.errors import UsageError, four_parts
from ..core.mesh import DeviceMesh, checked_mesh
from ..core.placements import REPLICATE, Placement, Placements, Shard, balanced
from ..core.spec import fitting_placements
from ..tensor.defaults import default_mesh
from ..tensor.tensor import Tensor
from .axes import MEANINGS, TENSOR, placements_on, size_of
from .fully_shard import fully_shard
from .hooks import settle_gradient
from .stages import assign_layers_to_stages

__all__ = [
    "ColumnParallelLinear",
    "ColumnParallelLinearWithReplicateOutput",
    "RowParallelLinear",
    "RowParallelLinearWithReplicateOutput",
    "VocabParallelEmbedding",
    "assign_layers_to_stages",
    "fully_shard",
]


def __getattr__(name: str) -> Any:
    """Everything else is ``torch.nn``'s."""
    return getattr(nn, name)


class _Split(nn.Module):
    """What the modules share: an input that is laid out before the operator, and an output after it."""

    tp_dim: str

    def redistribute_input(self, input: torch.Tensor) -> torch.Tensor:
        """How the input shall lie: whole over the axis, partial sums added up. A plain tensor is whole as it is."""
        return _whole(input, self.tp_dim)

    def redistribute_output(self, output: torch.Tensor) -> torch.Tensor:
        """How the output shall lie: as it comes."""
        return output

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The module of ``torch.nn``, between the two."""
        return self.redistribute_output(super().forward(self.redistribute_input(input)))

    def _load_from_state_dict(self, *args: Any) -> None:
        """As PyTorch's; what ``assign=True`` puts in a parameter's place comes to lie as that did."""
        before: dict[str, Any] = dict(self._parameters)
        super()._load_from_state_dict(*args)
        for name, new in list(self._parameters.items()):
            if new is not None and new is not before[name]:
                _place(self, name, new, before[name].device_mesh, before[name].placements)


class _SplitLinear(_Split, nn.Linear):
    """A linear layer that splits its parameters over an axis along the dims that ``split`` says."""

    split: Mapping[str, int] = {}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        dtype: torch.dtype | None = None,
        device_mesh: DeviceMesh | None = None,
        tp_dim: str = TENSOR,
        multiple_of: int = 1,
    ) -> None:
        super().__init__(in_features, out_features, bias, dtype=dtype)
        self.tp_dim = tp_dim
        _distribute(self, device_mesh, self.split, multiple_of)


class ColumnParallelLinear(_SplitLinear):
    """A linear layer whose output features are split: (..., in) whole over the axis to (..., out) split on its last dim.

    Args:
        in_features, out_features, bias, dtype: as in ``torch.nn.Linear``; sizes need not divide.
        device_mesh: where it lives; the default mesh when omitted.
        tp_dim: the mesh axis to split over.
        multiple_of: features that stay together, such as those of an attention head: every device has a multiple of them.
            Where there are fewer multiples than devices, some have none.

    Raises:
        UsageError: ``out_features`` is no multiple of ``multiple_of``, or the mesh has no axis ``tp_dim`` (see below).

    A mesh without an axis ``tp``, or of another name that ``parallelize`` knows, makes it an ordinary layer; so does a
    single device. A mesh without an axis of any other name is refused, for then the name is taken to be misspelt.
    """

    split = {"weight": 0, "bias": 0}


class ColumnParallelLinearWithReplicateOutput(ColumnParallelLinear):
    """``ColumnParallelLinear`` whose output is gathered: (..., in) to (..., out), both whole over the axis."""

    def redistribute_output(self, output: torch.Tensor) -> torch.Tensor:
        """How the output shall lie: whole over the axis."""
        return _whole(output, self.tp_dim)


class RowParallelLinear(_SplitLinear):
    """A linear layer whose input features are split: (..., in) split on its last dim to (..., out) as partial sums.

    Arguments as ``ColumnParallelLinear``'s, ``multiple_of`` being of input features. A bias is whole on every device. It is
    added to what ``redistribute_output`` gives, which sees the product alone; adding it to partial sums adds these up.
    """

    split = {"weight": 1}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The product of the pieces, laid out, and the bias."""
        if self.bias is None or not isinstance(self.weight, Tensor) or size_of(self.weight.device_mesh, self.tp_dim) == 1:
            return super().forward(input)
        product = functional.linear(self.redistribute_input(input), self.weight)
        return self.redistribute_output(product) + self.bias

    def redistribute_input(self, input: torch.Tensor) -> torch.Tensor:
        """How the input shall lie: split on its last dim into the pieces of the weight. A plain tensor is left as it is."""
        own = _placement(self.weight, self.tp_dim)
        if not isinstance(input, Tensor) or not isinstance(own, Shard) or _placement(input, self.tp_dim) is None:
            return input
        mesh, wanted = input.device_mesh, list(input.placements)
        wanted[mesh.axis(self.tp_dim)] = Shard(input.ndim - 1, own.sizes)
        return input.redistribute(placements=fitting_placements(mesh, wanted, input.shape))


class RowParallelLinearWithReplicateOutput(RowParallelLinear):
    """``RowParallelLinear`` whose partial sums are added up: (..., in) to (..., out), whole over the axis."""

    def redistribute_output(self, output: torch.Tensor) -> torch.Tensor:
        """How the output shall lie: whole over the axis."""
        return _whole(output, self.tp_dim)


class VocabParallelEmbedding(_Split, nn.Embedding):
    """An embedding whose vocabulary is split: indices (...) to (..., features), both whole over the axis.

    Args:
        num_embeddings, embedding_dim, dtype, options: as in ``torch.nn.Embedding``.
        device_mesh: where it lives; the default mesh when omitted.
        tp_dim: the mesh axis to split over; see ``ColumnParallelLinear`` for a mesh that has none.

    Raises:
        UsageError: the mesh has no axis ``tp_dim``, and it is none that may be absent.
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
        _distribute(self, device_mesh, {"weight": 0})

    def redistribute_output(self, output: torch.Tensor) -> torch.Tensor:
        """How the rows shall lie: whole over the axis. They come as partial sums: a device has those of its part."""
        return _whole(output, self.tp_dim)


def _distribute(module: _Split, mesh: DeviceMesh | None, dims: Mapping[str, int], multiple_of: int = 1) -> None:
    """Put a fresh module's parameters on a mesh, those named split over its axis along a dim."""
    home = default_mesh() if mesh is None else checked_mesh(mesh)
    _check_axis(module, home)
    for name, plain in list(module.named_parameters(recurse=False)):
        by_axis = {module.tp_dim: _pieces(module, plain, dims[name], home, multiple_of)} if name in dims else {}
        _place(module, name, plain, home, placements_on(home, by_axis))


def _place(module: nn.Module, name: str, data: nn.Parameter, mesh: DeviceMesh, placements: Placements) -> None:
    placed = nn.Parameter(Tensor(data.detach(), device_mesh=mesh, placements=placements), data.requires_grad)
    if data.requires_grad:
        placed.register_post_accumulate_grad_hook(settle_gradient)
    setattr(module, name, placed)


def _pieces(module: _Split, parameter: torch.Tensor, dim: int, mesh: DeviceMesh, multiple_of: int) -> Placement:
    length = parameter.shape[dim]
    if multiple_of < 1 or length % multiple_of:
        raise UsageError(
            four_parts(
                f"multiple_of={multiple_of!r} for {length} features",
                "every device has a multiple of that, so all features together are one",
                f"dtorch.nn.{type(module).__name__}(in_features, out_features, multiple_of=...)",
                "give a divisor of the features that are split, e.g. the size of an attention head",
            )
        )
    if multiple_of == 1:
        return Shard(dim)
    return Shard(dim, tuple(n * multiple_of for n in balanced(length // multiple_of, size_of(mesh, module.tp_dim))))


def _check_axis(module: _Split, mesh: DeviceMesh) -> None:
    if module.tp_dim in mesh.axis_names() or module.tp_dim in MEANINGS or mesh.size() == 1:
        return
    raise UsageError(
        four_parts(
            f"tp_dim={module.tp_dim!r} on {mesh!r}",
            f"the axis to split over is one of the mesh's; only {', '.join(MEANINGS)} may be absent",
            f"dtorch.nn.{type(module).__name__}(..., tp_dim=...)",
            f"use one of {mesh.axis_names()}, or give the mesh an axis of that name, of one device where nothing is to be split",
        )
    )


def _placement(tensor: torch.Tensor, axis: str) -> Placement | None:
    """How a tensor lies along an axis; None where it has no such axis."""
    if not isinstance(tensor, Tensor):
        return None
    names = tensor.device_mesh.axis_names()
    return tensor.placements[names.index(axis)] if axis in names else None


def _whole(tensor: torch.Tensor, axis: str) -> torch.Tensor:
    return tensor.redistribute_by_dict({axis: REPLICATE}) if isinstance(tensor, Tensor) else tensor
