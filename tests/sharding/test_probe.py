"""Dtypes that PyTorch refuses are refused on the user's line, in PyTorch's words, and no others."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import Replicate, Shard, init_device_mesh
from dtorch.sharding.probe import DTYPES

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")
MESH = init_device_mesh("cpu", 2)
ORDERED = sorted(DTYPES, key=str)

# Of a (3, 4) tensor x and another y of that shape, of any two dtypes.
PAIRS: dict[str, Callable[[Any, Any], Any]] = {
    "sub": lambda x, y: x - y,
    "div": lambda x, y: x / y,
    "floor_divide": lambda x, y: x // (y + 1),
    "pow": lambda x, y: x**y,
    "and": lambda x, y: x & y,
    "compare": lambda x, y: x < y,
    "maximum": lambda x, y: torch.maximum(x, y),
    "atan2": lambda x, y: torch.atan2(x, y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.5),
    "where": lambda x, y: torch.where(x > 0 if not x.is_complex() else x == 0, x, y),
    "addcmul": lambda x, y: torch.addcmul(x, y, y),
    "in place": lambda x, y: x.clone().mul_(y),
    "copy": lambda x, y: x.clone().copy_(y),
    "mm": lambda x, y: x @ y.t(),
    "addmm": lambda x, y: torch.addmm(y[:, :3], x, y.t()),
    "mv": lambda x, y: x @ y[0],
    "bmm": lambda x, y: torch.bmm(x[None], y.t()[None]),
    "linear": lambda x, y: F.linear(x, y, y[:, 0]),
    "conv": lambda x, y: F.conv1d(x[None], y[:, :3, None]),
    "mse": lambda x, y: F.mse_loss(x, y),
    "index_select": lambda x, y: x.index_select(0, y[0, :1] * 0),
    "gather": lambda x, y: x.gather(1, y * 0),
    "index_add": lambda x, y: x.index_add(0, torch.tensor([0, 0, 1]), y),
    "scatter": lambda x, y: x.scatter(1, torch.zeros(3, 4).long(), y),
    "masked_fill": lambda x, y: x.masked_fill(y, 1),
    "cat": lambda x, y: torch.cat([x, y]),
}

ONES: dict[str, Callable[[Any], Any]] = {
    **{
        name: lambda x, name=name: getattr(torch, name)(x)
        for name in ("abs", "neg", "exp", "sign", "round", "bitwise_not", "logical_not")
    },
    **{
        name: lambda x, name=name: getattr(torch, name)(x)
        for name in ("sum", "mean", "amax", "argmax", "all", "median", "sort", "aminmax")
    },
    **{
        name: lambda x, name=name: getattr(torch, name)(x, 1)
        for name in ("cumsum", "cummax", "softmax", "logsumexp", "prod", "max")
    },
    **{name: lambda x, name=name: getattr(F, name)(x) for name in ("relu", "gelu", "silu", "elu", "hardtanh", "softplus")},
    "rsub": lambda x: 2 - x,
    "float scalar in place": lambda x: x.clone().add_(0.5),
    "negative power": lambda x: x**-1,
    "alpha": lambda x: torch.add(x, x, alpha=0.5),
    "clamp": lambda x: x.clamp(0, 1),
    "norm": lambda x: torch.linalg.vector_norm(x),
}


def tensor(dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(12) % 3 + 1).view(3, 4).to(dtype)


def outcome(program: Callable[..., Any], *inputs: Any) -> tuple[type, str] | None:
    """Type and first line of what a program raises before anything is read."""
    try:
        program(*inputs)
    except Exception as error:
        return type(error), str(error).splitlines()[0]
    return None


def compare(program: Callable[..., Any], *plain: torch.Tensor) -> None:
    expected = outcome(program, *plain)
    for placement in (Replicate(), Shard(0)):
        actual = outcome(program, *[dtorch.Tensor(t, device_mesh=MESH, placements=[placement]) for t in plain])
        assert (actual is None) == (expected is None), f"{[t.dtype for t in plain]}: {actual}, PyTorch {expected}"
        assert actual is None or not issubclass(actual[0], dtorch.DTorchError)


@pytest.mark.parametrize("name", PAIRS)
def test_two_dtypes(name: str) -> None:
    for a, b in itertools.product(ORDERED, ORDERED):
        compare(PAIRS[name], tensor(a), tensor(b))


@pytest.mark.parametrize("name", ONES)
def test_one_dtype(name: str) -> None:
    for dtype in ORDERED:
        compare(ONES[name], tensor(dtype))


@pytest.mark.parametrize(
    "options", [{"stride": 2, "padding": 1, "output_padding": 1}, {"padding": 2, "dilation": 2}, {"groups": 2}]
)
def test_a_convolution_s_other_arguments_do_not_matter(options: dict[str, Any]) -> None:
    x, w = torch.ones(2, 4, 6, 6), torch.ones(4, 2, 3, 3)
    options = {**options}
    compare(lambda x, w: F.conv_transpose2d(x, w, **options), x, w)
    options.pop("output_padding", None)
    compare(lambda x, w: F.conv2d(x, w[:, : 4 // options.get("groups", 1)], **options), x, torch.ones(4, 4, 3, 3))


def test_what_only_elements_would_refuse_is_accepted_where_there_are_none() -> None:
    compare(lambda x: x[:0] // 0, tensor(torch.int64))
    compare(lambda x: x[:, :0].index_select(1, torch.zeros(0, dtype=torch.int64)), tensor(torch.int64))
    for other in (torch.complex64, torch.float64, torch.int64):
        compare(lambda x, y: torch.bmm(x[None], y[None, :, :0]), torch.ones(3, 4), torch.ones(4, 2, dtype=other))


def test_the_words_are_pytorch_s() -> None:
    x = dtorch.ones(3, 3, device_mesh=MESH, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="Subtraction, the `-` operator, with a bool tensor is not supported"):
        2 - x
    with pytest.raises(RuntimeError, match="same dtype"):
        x.float() @ x.double()
    assert (1 - x.float()).sum().item() == 0
