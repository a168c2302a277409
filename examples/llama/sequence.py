"""Where residuals lie between the tensor-parallel regions: whole on each device of ``tp``, or split along the sequence."""

from __future__ import annotations

import torch

from dtorch import Replicate, Shard, nn


class Scattered:
    """A module whose partial sums are scattered over the sequence: a reduce-scatter in place of an all-reduce."""

    def redistribute_output(self, y_BTD: torch.Tensor) -> torch.Tensor:
        """Split along T over ``tp``."""
        return y_BTD.redistribute_by_dict({"tp": Shard(1)})


class ScatteredRow(Scattered, nn.RowParallelLinear):
    """The end of a tensor-parallel region."""


class ScatteredEmbedding(Scattered, nn.VocabParallelEmbedding):
    """The table of tokens."""


class Norm(nn.RMSNorm):
    """Works on the tokens where they are, and hands all of them on: gathered once here, not by each of query, key and value."""

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """The norm, whole over ``tp``."""
        return super().forward(x_BTD).redistribute_by_dict({"tp": Replicate()})
