"""Which dim a style splits, by kind of module."""

from __future__ import annotations

import pytest
from torch import nn
from transformers.pytorch_utils import Conv1D

from dtorch import UsageError
from dtorch.parallel.styles import STYLES, split_dim, style_named

LINEAR, TRANSPOSED, TABLE, CONVOLUTION, EXPERTS = (
    nn.Linear(2, 3),
    Conv1D(3, 2),
    nn.Embedding(5, 2),
    nn.Conv2d(2, 3, 1),
    nn.Module(),
)


@pytest.mark.parametrize(
    ("style", "owner", "name", "ndim", "dim"),
    [
        ("colwise", LINEAR, "weight", 2, 0),
        ("colwise", LINEAR, "bias", 1, 0),
        ("rowwise", LINEAR, "weight", 2, 1),
        ("rowwise", LINEAR, "bias", 1, None),
        ("colwise", TRANSPOSED, "weight", 2, 1),
        ("rowwise", TRANSPOSED, "weight", 2, 0),
        ("rowwise", TRANSPOSED, "bias", 1, None),
        ("embedding_rowwise", TABLE, "weight", 2, 0),
        ("embedding_colwise", TABLE, "weight", 2, 1),
        ("colwise", CONVOLUTION, "weight", 4, 0),
        ("rowwise", CONVOLUTION, "weight", 4, 1),
        ("packed_colwise", EXPERTS, "gate_up_proj", 3, 1),
        ("rowwise", EXPERTS, "down_proj", 3, 2),
        ("colwise", EXPERTS, "gate_up_proj_bias", 2, 1),
        ("rowwise", EXPERTS, "down_proj_bias", 2, None),
        ("colwise", EXPERTS, "sinks", 1, 0),
        ("replicate", LINEAR, "weight", 2, None),
        ("colwise", EXPERTS, "scale", 0, None),
    ],
)
def test_split_dim(style: str, owner: nn.Module, name: str, ndim: int, dim: int | None) -> None:
    assert split_dim(STYLES[style], owner, name, ndim) == dim


def test_an_unknown_style_is_refused_with_the_list_of_known_ones() -> None:
    with pytest.raises(UsageError, match=r"(?s)'columnwise'.*'colwise'.*where: here"):
        style_named("columnwise", "here")
