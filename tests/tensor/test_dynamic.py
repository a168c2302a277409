"""Shapes that depend on data: the program waits for them, and everything after them works."""

from __future__ import annotations

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard, init_device_mesh
from tests.sharding.harness import check, place, values

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule:RuntimeWarning")
MESH = init_device_mesh("cpu", (2, 2))

PROGRAMS = {
    "nonzero": lambda x: torch.nonzero(x > 0),
    "nonzero as a tuple": lambda x: torch.nonzero(x > 0, as_tuple=True),
    "argwhere": lambda x: torch.argwhere(x.clamp_min(0)),
    "where of one argument": lambda x: torch.where(x > 0.5),
    "boolean index": lambda x: x[x > 0],
    "boolean index of rows": lambda x: x[x[:, 0] > 0],
    "boolean index of rows and a column": lambda x: x[x[:, 0] > 0, 1],
    "boolean index of columns": lambda x: x[:, x[0] > 0],
    "plain boolean index": lambda x: x[torch.tensor([True, False, True, True, False])] * 2,
    "masked_select": lambda x: torch.masked_select(x, x < 0),
    "unique": lambda x: torch.unique((x * 2).long()),
    "unique with inverse and counts": lambda x: torch.unique((x * 2).long(), return_inverse=True, return_counts=True),
    "unique rows": lambda x: torch.unique((x > 0).long(), dim=0),
    "unique_consecutive": lambda x: torch.unique_consecutive(x.flatten().round()),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, (x[:, 0].abs() * 2).long(), dim=0),
    "bincount": lambda x: torch.bincount((x.flatten() + 3).long()),
    "nothing selected": lambda x: x[x > 1000],
    "everything selected": lambda x: x[x > -1000],
    "and on": lambda x: x[x > 0].sort().values.cumsum(0).view(-1, 1).expand(-1, 2).sum(0),
    "used as an index": lambda x: x.flatten()[torch.nonzero(x.flatten() > 0).squeeze(1)],
    "assigned by mask": lambda x: _assigned(x.clone()),
    "item": lambda x: x.sum().item(),
    "bool": lambda x: 1 if (x > 0).any() else 2,
    "int as a size": lambda x: x.new_zeros(int((x > 0).sum())).shape[0],
    "iteration": lambda x: [row.max().item() for row in x],
    "tolist": lambda x: x.tolist(),
    "python max and sorted": lambda x: [float(max(x[:, 0])), [float(v) for v in sorted(x[0])]],
    "loop until": lambda x: _loop(x),
    "unpacking": lambda x: (lambda a, *rest: a.sum() + rest[-1].sum())(*x),
    "range and slices": lambda x: x[: int((x[:, 0] > 0).sum())],
    "a global scalar as an index": lambda x: x[(x[0] > 0).sum() % 5],
    "plain indexed by a global scalar": lambda x: torch.arange(10)[(x[0] > 0).sum()] * 1,
}


def _assigned(z: torch.Tensor) -> torch.Tensor:
    z[z > 0] = z[z > 0] * 10
    z[torch.nonzero(z[:, 1] < 0).squeeze(1)] -= 1
    return z


def _loop(x: torch.Tensor) -> torch.Tensor:
    while x.abs().max() > 0.5:
        x = x / 2
    return x


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_programs(program: object) -> None:
    check(program, values(5, 4), rule=False, limit=30)


def test_gradients_through_a_data_dependent_shape() -> None:
    check(lambda x: x[x > 0] * 3, values(5, 4), grad=True, rule=False, limit=20)
    check(lambda x: torch.masked_select(x, x < 0).pow(2), values(5, 4), grad=True, rule=False, limit=10)


def test_results_lie_on_the_same_mesh() -> None:
    x = place(values(5, 4), MESH, (Shard(0), Partial()))
    for t in (torch.nonzero(x > 0), x[x > 0], *torch.unique(x, return_inverse=True)):
        assert t.device_mesh is MESH
        assert all(isinstance(p, Replicate | Shard) for p in t.placements)


def test_comparing_waits_and_plain_control_flow_works() -> None:
    loss = place(values(5, 4), MESH, (Shard(0), Shard(1))).pow(2).mean()
    assert loss > 0 and not loss < 0
    assert float(loss) == pytest.approx(float(values(5, 4).pow(2).mean()))
    assert f"{loss:.3f}" == f"{float(values(5, 4).pow(2).mean()):.3f}"
    assert round(loss.item(), 3) == round(float(loss), 3) and int(loss * 0 + 2.7) == 2
    assert torch.is_nonzero(loss) and not bool(dtorch.zeros((), device_mesh=MESH))
    assert [0, 1, 2, 3][dtorch.Tensor(2, device_mesh=MESH)] == 2
    assert list(range(dtorch.Tensor(3, device_mesh=MESH))) == [0, 1, 2]
