"""Views that count in memory: right where they can be found, else refused, never other elements."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dtorch import Replicate, Shard, UsageError, init_device_mesh
from tests.sharding.harness import check, place, same, values

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule:RuntimeWarning")
R = Replicate()
LINE, GRID = init_device_mesh("cpu", 3), init_device_mesh("cpu", (2, 2))
HOMES = [(LINE, (R,)), (LINE, (Shard(0),)), (LINE, (Shard(1),)), (GRID, (Shard(0), Shard(1)))]

FOUND: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "with an offset": lambda x: x.as_strided((2, 2), (3, 1), 4),
    "of rows": lambda x: x[1:].as_strided((2, 2), (3, 1)),
    "of a transposed one": lambda x: x.t().as_strided((4, 2), (3, 1), 1),
    "of a flat one": lambda x: x.view(-1).as_strided((4, 2), (2, 3), 2),
    "of a part of a part": lambda x: x[1:][1:].as_strided((5,), (2,)),
    "scattered": lambda x: torch.as_strided_scatter(x, x[0, :2] * 2, (2,), (4,), 3),
    "copied": lambda x: torch.as_strided_copy(x[2:], (2, 2), (1, 2)),
    "nothing": lambda x: x[:, 0].as_strided((0, 3), (3, 1)),
}


@pytest.mark.parametrize("fn", FOUND.values(), ids=FOUND)
def test_places_in_memory_are_those_of_plain_tensors(fn: Callable) -> None:
    check(fn, values(5, 3), grad=True, rule=False, limit=8)


# May be right where the tensor is not split, and is never wrong.
BESIDE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows by the base's places": lambda x: x[1:].as_strided((2, 2), (3, 1), 4),
    "rows of data by the base's places": lambda x: x.detach()[1:].as_strided((2, 2), (3, 1), 4),
    "a column and what is beside it": lambda x: x[:, 0].as_strided((2, 2), (3, 1)),
    "a column and what is before it": lambda x: x[:, 1].as_strided((2, 2), (3, 1), 0),
    "every other row and those between": lambda x: x[::2].as_strided((2, 3), (3, 1)),
    "what follows": lambda x: x[1:3].as_strided((8,), (1,)),
    "an expanded one": lambda x: x[:1].expand(4, 3).as_strided((3, 3), (3, 1)),
    "scattered into a part": lambda x: torch.as_strided_scatter(x[1:], x[0, :2], (2,), (3,), 4),
    "in place": lambda x: (x * 1)[1:].as_strided_((2, 2), (3, 1), 4),
    "written": lambda x: _written(x * 1),
}


def _written(z: torch.Tensor) -> torch.Tensor:
    z[1:].as_strided((2, 2), (3, 1), 4).fill_(9)
    return z


@pytest.mark.parametrize("home", HOMES, ids=str)
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("fn", BESIDE.values(), ids=BESIDE)
def test_places_beside_a_view_are_refused_or_right(fn: Callable, inference: bool, home: tuple) -> None:
    x = values(5, 3, distinct=True)
    with torch.inference_mode(inference):
        try:
            got = fn(place(x, *home))
        except UsageError as error:
            assert "to do:" in str(error) and "as_strided" in str(error)
            assert home[1] != (R,) or "storage_offset" in str(error)
        else:
            assert home[1] == (R,)
            same(got, fn(x), str(home))


@pytest.mark.parametrize("home", HOMES, ids=str)
def test_gradients_of_places_beside_a_view_are_refused_or_right(home: tuple) -> None:
    for fn in (BESIDE["rows by the base's places"], BESIDE["a column and what is beside it"]):
        x, z = values(5, 3).requires_grad_(), place(values(5, 3), *home).requires_grad_()
        fn(x).sum().backward()
        try:
            fn(z).sum().backward()
        except UsageError:
            continue
        same(z.grad, x.grad, str(home))
