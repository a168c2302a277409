"""Products to which something is added: where what they sum over is split, they give partial sums, and move nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import Partial, Replicate, Shard, explain, init_device_mesh
from dtorch.core.placements import Placement
from tests.sharding.harness import check, values

PRODUCTS = {
    "linear": (lambda b, x, w: F.linear(x, w.t(), b), (5,), (2, 3, 4), (4, 5)),
    "linear of a vector": (lambda b, x, w: F.linear(x, w.t(), b), (5,), (4,), (4, 5)),
    "linear of one number": (lambda b, x, w: F.linear(x, w.t(), b), (1,), (3, 4), (4, 5)),
    "addmm": (torch.addmm, (5,), (3, 4), (4, 5)),
    "addmm of a column": (torch.addmm, (3, 1), (3, 4), (4, 5)),
    "addmm scaled": (lambda b, x, w: torch.addmm(b, x, w, beta=2, alpha=0.5), (3, 5), (3, 4), (4, 5)),
    "addmm of nothing": (lambda b, x, w: torch.addmm(b / 0, x, w, beta=0), (3, 5), (3, 4), (4, 5)),
    "addmv": (torch.addmv, (5,), (5, 4), (4,)),
    "baddbmm": (lambda b, x, w: torch.baddbmm(b, x, w, beta=2, alpha=3), (3, 5), (2, 3, 4), (2, 4, 5)),
    "addbmm": (lambda b, x, w: torch.addbmm(b, x, w, beta=2, alpha=3), (5,), (2, 3, 4), (2, 4, 5)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_numbers_and_gradients(name: str) -> None:
    fn, *shapes = PRODUCTS[name]
    check(fn, *(values(*shape, seed=n) for n, shape in enumerate(shapes)), grad="nothing" not in name)


@pytest.mark.parametrize("name", ["addmm", "addbmm"])
def test_whole_numbers(name: str) -> None:
    fn, *shapes = PRODUCTS[name]
    check(fn, *(values(*shape, seed=n, dtype=torch.int64) for n, shape in enumerate(shapes)))


@pytest.mark.parametrize("factor", ["alpha", "beta"])
def test_infinitely_many_times(factor: str) -> None:
    x, w = torch.tensor([[1.0, 1.0]]), torch.tensor([[3.0], [-1.0]])
    check(lambda b: torch.addmm(b, x, w, **{factor: torch.inf}), values(1, 1) + 8)
    check(lambda x, w: torch.addmm(torch.ones(1, 1), x, w, **{factor: torch.inf}), x, w)


INNER = {"sizes alike": Shard(1), "uneven": Shard(1, (1, 5)), "all on one": Shard(1, (0, 6))}


@pytest.mark.parametrize("split", INNER)
@pytest.mark.parametrize("op", [torch.addmm, lambda b, x, w: F.linear(x, w.t(), b)], ids=["addmm", "linear"])
def test_a_split_inner_dim_gives_a_partial_sum_and_moves_nothing(op: object, split: str) -> None:
    mesh = init_device_mesh("cpu", 2)
    rows = Shard(0, INNER[split].sizes)
    given: list[tuple[torch.Tensor, Placement]] = [(values(3), Replicate()), (values(64, 6), INNER[split]), (values(6, 3), rows)]
    b, x, w = (dtorch.Tensor(t, device_mesh=mesh, placements=[p]) for t, p in given)
    with explain() as report:
        made = op(b, x, w)
    assert made.placements == (Partial(),) and not report.events
    torch.testing.assert_close(made.to_torch(), op(*(t for t, _ in given)))


@pytest.mark.parametrize("batch", [2, 64])
def test_beside_a_split_batch_the_inner_dim_stays_split(batch: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    b = dtorch.Tensor(values(8), device_mesh=mesh)
    x = dtorch.Tensor(values(batch, 8), device_mesh=mesh, placements=[Shard(0), Shard(1)])
    w = dtorch.Tensor(values(8, 8), device_mesh=mesh, placements=[Replicate(), Shard(0)])
    with explain() as report:
        assert torch.addmm(b, x, w).placements == (Shard(0), Partial())
    assert not report.events
