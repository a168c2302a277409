"""Operators, views, writes, gradients and random numbers on worker processes are those of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard, init_device_mesh
from dtorch.testing.programs.batch import numbered
from dtorch.testing.programs.run import run
from tests.cases import CASES
from tests.sharding.harness import check, place, values
from tests.tensor.test_autograd import OPERATORS
from tests.tensor.test_dynamic import PROGRAMS
from tests.test_cases import plain_inputs

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule:RuntimeWarning")
MESHES = ((3,), (2, 2))


@pytest.mark.parametrize(("kind", "inputs", "fn"), [c[1:2] + c[3:] for c in CASES], ids=[c[0] for c in CASES])
def test_cases(kind: str, inputs: dict, fn: Callable) -> None:
    plain = plain_inputs(inputs)

    def program(*tensors: torch.Tensor) -> object:
        with torch.enable_grad():
            return fn(**dict(zip(plain, tensors, strict=True)))

    check(program, *plain.values(), rule=False, meshes=MESHES, limit=2)


@pytest.mark.parametrize("fn", OPERATORS.values(), ids=OPERATORS)
def test_gradients(fn: Callable) -> None:
    inputs = values(5, 4), values(5, 4, seed=1)
    check(fn, *inputs, grad=True, rule=False, meshes=MESHES, limit=2, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fn", PROGRAMS.values(), ids=PROGRAMS)
def test_shapes_that_depend_on_values(fn: Callable) -> None:
    check(fn, values(5, 4), rule=False, meshes=MESHES, limit=2)


@pytest.mark.parametrize("number", range(30))
def test_random_programs(number: int) -> None:
    failure = run(numbered(0, number)).failure
    assert failure is None, failure


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
def test_dtypes(dtype: torch.dtype) -> None:
    x = (values(5, 4) > 0) if dtype == torch.bool else values(5, 4, dtype=dtype)
    check(lambda t: (t[1:] + t[:-1], t.t()[::2], t.flatten().roll(3)), x, rule=False, meshes=((3,), (2, 3)), limit=4)


def test_pieces_of_one_element_and_of_none() -> None:
    mesh = init_device_mesh("cpu", (2, 3))
    whole = torch.arange(8.0).reshape(4, 2)
    for sizes in ((1, 1, 2), (0, 1, 3), (4, 0, 0)):
        column = dtorch.Tensor(whole, device_mesh=mesh, placements=[Replicate(), Shard(0, sizes)])[:, 1]
        assert torch.equal(column.redistribute(placements=[Shard(0), Replicate()]).to_torch(), whole[:, 1])
        assert column.sum().item() == 16 and (column.expand(3, 4) * 2).max().item() == 14


@pytest.mark.parametrize("sizes", [(9000, 100, 4000), (0, 8500, 10)])
def test_large_sums_beside_small_ones(sizes: tuple[int, ...]) -> None:
    whole = torch.arange(sum(sizes))
    parts = dtorch.Tensor(whole, device_mesh=init_device_mesh("cpu", (2, 3))).redistribute(
        placements=[Partial(), Shard(0, sizes)]
    )
    assert torch.equal(parts.redistribute(placements=[Replicate(), Shard(0, sizes)]).to_torch(), whole)


DRAWN: dict[str, Callable[[torch.Tensor], object]] = {
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.5),
    "like": lambda x: torch.rand_like(x) + torch.randn_like(x),
    "in place": lambda x: x.clone().normal_().add_(x.clone().uniform_(-1, 1)).bernoulli_(0.3),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "multinomial": lambda x: torch.multinomial(x.abs() + 1, 2),
    "permutation": lambda x: x[torch.randperm(5)],
    "init": lambda x: torch.nn.init.trunc_normal_(x.clone()) + torch.nn.init.kaiming_uniform_(x.clone()),
}


@pytest.mark.parametrize("fn", DRAWN.values(), ids=DRAWN)
def test_random_numbers(fn: Callable[[torch.Tensor], object]) -> None:
    def seeded(x: torch.Tensor) -> object:
        torch.manual_seed(3)
        return fn(x), fn(x), torch.rand(2)

    check(seeded, values(5, 4), rule=False, meshes=MESHES, limit=6)


def test_a_generator_of_ones_own() -> None:
    x = place(values(6, 4), init_device_mesh("cpu", (2, 3)), (Shard(1), Shard(0)))
    drawn = [t.clone().normal_(generator=torch.Generator().manual_seed(4)) for t in (x, values(6, 4))]
    assert torch.equal(drawn[0].to_torch(), drawn[1])


def test_default_dtypes_are_followed() -> None:
    mesh = init_device_mesh("cpu", 3)
    x = dtorch.Tensor(torch.arange(6), device_mesh=mesh, placements=[Shard(0)])
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float64, torch.bfloat16, torch.float32):
            torch.set_default_dtype(dtype)
            half = x / 4
            assert half.dtype == dtype and torch.equal(half.to_torch(), torch.arange(6) / 4)
    finally:
        torch.set_default_dtype(before)
