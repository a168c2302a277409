"""Products of groups of rows, as in a mixture of experts: uneven pieces, ends of groups anywhere, gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dtorch import Partial, Replicate, Shard
from tests.sharding.harness import check, stays, values

pytestmark = pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="a newer PyTorch has it")
product = torch.ops.aten._grouped_mm.default
R = Replicate()
ENDS = {
    "an empty group": [2, 2, 8],
    "an empty first group": [0, 5, 8],
    "all in one": [8, 8, 8],
    "one row each": [1, 2, 8],
}
FORMS = {
    "rows": ((8, 4), (3, 4, 8)),
    "columns": ((3, 4, 8), (8, 8)),
    "summed": ((4, 8), (8, 8)),
}


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("shapes", FORMS.values(), ids=FORMS)
def test_forms(shapes: tuple, ends: list[int]) -> None:
    offs = torch.tensor(ends, dtype=torch.int32)
    check(product, values(*shapes[0]), values(*shapes[1], seed=2), offs, limit=40)


def test_a_batch_without_groups() -> None:
    check(product, values(3, 4, 8), values(3, 8, 4, seed=2), limit=40)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    offs = torch.tensor([3, 3, 7], dtype=torch.int32)
    a, b = values(8, 8, dtype=dtype), values(3, 8, 16, seed=2, dtype=dtype)
    # A split sum is rounded once more.
    check(lambda a, b, o: product(a, b, o)[:7], a, b, offs, limit=40, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients(transposed: bool) -> None:
    def layer(x: torch.Tensor, w: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(x, w.transpose(1, 2) if transposed else w, offs=o).relu()

    offs = torch.tensor([2, 2, 8], dtype=torch.int32)
    check(layer, values(8, 8), values(3, 8, 8, seed=2), offs, grad=True, limit=60)


@pytest.mark.parametrize(
    ("mesh", "placements", "out"),
    [
        ((2,), [[Shard(0)], [R], [R]], [Shard(0)]),
        ((3,), [[Shard(0)], [R], [R]], [Shard(0)]),
        ((2,), [[R], [Shard(2)], [R]], [Shard(1)]),
        ((2,), [[Shard(1)], [Shard(1)], [R]], [Partial()]),
        ((2, 2), [[Shard(0), R], [R, Shard(2)], [R, R]], [Shard(0), Shard(1)]),
        ((2, 2), [[Shard(0), Shard(1)], [R, Shard(1)], [R, R]], [Shard(0), Partial()]),
    ],
)
def test_tokens_and_features_stay_where_they_are(mesh: tuple, placements: list, out: list) -> None:
    offs = torch.tensor([3, 3, 8], dtype=torch.int32)
    made = stays(product, values(8, 8), values(3, 8, 8, seed=2), offs, mesh=mesh, placements=placements)
    assert list(made.placements) == out


def test_a_weights_gradient_is_a_partial_sum_over_split_tokens() -> None:
    offs = torch.tensor([70, 70, 256], dtype=torch.int32)
    placements = [[Shard(1)], [Shard(0)], [R]]
    made = stays(product, values(4, 256), values(256, 8, seed=2), offs, mesh=(2,), placements=placements)
    assert list(made.placements) == [Partial()]
