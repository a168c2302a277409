"""``out=`` given to composites and factories: never lost, whatever PyTorch's C++ does on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard, init_device_mesh
from dtorch.sharding.call import functional_of, schema_of
from dtorch.tensor.composites import OUT
from tests.sharding.harness import check, place, same, values

SYMMETRIC = values(3, 5, 5) + values(3, 5, 5).mT + 8 * torch.eye(5)
COMPOSITES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], torch.Tensor]] = {
    "matrix_rank": (torch.linalg.matrix_rank, (values(5, 5),), torch.tensor(9)),
    "matrix_rank of a batch": (torch.linalg.matrix_rank, (values(3, 5, 4),), torch.zeros(3, dtype=torch.int64)),
    "matrix_rank with tolerance": (
        lambda x, out: torch.linalg.matrix_rank(x, tol=1.0, hermitian=True, out=out),
        (SYMMETRIC,),
        torch.zeros(3, dtype=torch.int64),
    ),
    "kron": (torch.kron, (values(3, 2), values(2, 5)), torch.zeros(6, 10)),
    "kron resized": (torch.kron, (values(3, 2), values(2, 5)), torch.zeros(0)),
    "matmul folded": (torch.matmul, (values(3, 5, 4), values(4, 5)), torch.zeros(3, 5, 5)),
    "matmul": (torch.matmul, (values(5, 4), values(3, 4, 2)), torch.zeros(3, 5, 2)),
    "matrix_power": (lambda x, out: torch.linalg.matrix_power(x, 3, out=out), (values(3, 5, 5),), torch.zeros(3, 5, 5)),
    "tensordot": (lambda a, b, out: torch.tensordot(a, b, 1, out=out), (values(5, 4), values(4, 3)), torch.zeros(5, 3)),
    "inner": (torch.inner, (values(5, 4), values(3, 4)), torch.zeros(5, 3)),
    "outer": (torch.outer, (values(5), values(4)), torch.zeros(5, 4)),
    "norm": (lambda x, out: torch.linalg.norm(x, dim=1, out=out), (values(5, 4),), torch.zeros(5)),
    "diff": (lambda x, out: torch.diff(x, dim=0, out=out), (values(5, 3),), torch.zeros(4, 3)),
    "quantile": (lambda x, out: torch.quantile(x, 0.5, dim=0, out=out), (values(5, 3),), torch.zeros(3)),
    "vstack": (lambda a, b, out: torch.vstack((a, b), out=out), (values(2, 3), values(3, 3)), torch.zeros(5, 3)),
    "maximum": (lambda a, b, out: torch.max(a, b, out=out), (values(5), values(5, seed=1)), torch.zeros(5)),
    "float_power": (lambda x, out: torch.float_power(x, 2, out=out), (values(5),), torch.zeros(5, dtype=torch.float64)),
}
FACTORIES: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "zeros": (lambda out: torch.zeros(5, 3, out=out), (5, 3)),
    "full": (lambda out: torch.full((5, 3), 2, out=out), (5, 3)),
    "ones resized": (lambda out: torch.ones(5, 3, out=out), (2,)),
    "eye": (lambda out: torch.eye(5, 3, out=out), (5, 3)),
    "arange": (lambda out: torch.arange(1, 6, out=out), (5,)),
    "linspace": (lambda out: torch.linspace(0, 1, 5, out=out), (5,)),
    "linspace between tensors": (lambda out: torch.linspace(torch.tensor(0.0), torch.tensor(1.0), 5, out=out), (5,)),
    "logspace": (lambda out: torch.logspace(torch.tensor(0.0), 1, 5, out=out), (5,)),
}


@pytest.mark.parametrize("name", COMPOSITES)
def test_composite_writes_to_out(name: str) -> None:
    fn, inputs, out = COMPOSITES[name]

    def program(*tensors: torch.Tensor) -> Any:
        *given, to = tensors
        to = to.clone()
        returned = fn(*given, out=to)
        assert returned is to
        return to

    check(program, *inputs, out, rule=False, limit=25)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(0, (4, 1)), Partial()], ids=str)
@pytest.mark.parametrize("name", FACTORIES)
def test_factory_writes_to_out(name: str, placement: Any) -> None:
    fn, shape = FACTORIES[name]
    if isinstance(placement, Shard) and placement.sizes and shape[0] != 5:
        placement = Shard(0)
    mesh = init_device_mesh("cpu", (2,))
    out = place(values(*shape), mesh, (placement,))
    with dtorch.explain() as report:
        returned = fn(out)
    assert returned is out and not report.replicated
    same(out, fn(values(*shape)), name)


def test_random_factory_draws_the_same_numbers_into_out() -> None:
    mesh = init_device_mesh("cpu", (3,))
    out = dtorch.zeros(5, 2, device_mesh=mesh, placements=[Shard(0)])
    torch.manual_seed(3)
    torch.normal(1.0, 2.0, (5, 2), out=out)
    torch.manual_seed(3)
    same(out, torch.normal(1.0, 2.0, (5, 2)), "normal")


def test_out_that_is_a_view_or_a_plain_tensor() -> None:
    mesh = init_device_mesh("cpu", (2,))
    base = dtorch.zeros(4, 6, device_mesh=mesh, placements=[Shard(1)])
    a, b = values(2, 2), values(2, 3)
    torch.kron(dtorch.Tensor(a, device_mesh=mesh), b, out=base)
    assert torch.equal(base.to_torch(), torch.kron(a, b))
    whole = dtorch.zeros(2, 4, 6, device_mesh=mesh, placements=[Shard(2)])
    torch.kron(dtorch.Tensor(a, device_mesh=mesh), b, out=whole[1])
    assert torch.equal(whole.to_torch()[1], torch.kron(a, b)) and not whole.to_torch()[0].any()
    plain = torch.zeros(4, 6)
    assert torch.kron(dtorch.Tensor(a, device_mesh=mesh), b, out=plain) is plain
    assert torch.equal(plain, torch.kron(a, b))


def test_out_with_a_gradient_is_refused_as_in_pytorch() -> None:
    mesh = init_device_mesh("cpu", (2,))
    x = dtorch.randn(2, 2, device_mesh=mesh, requires_grad=True)
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        torch.kron(x, x, out=dtorch.zeros(4, 4, device_mesh=mesh))


def test_plain_tensors_under_a_mode_are_left_alone() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert torch.kron(torch.ones(2, 2), torch.ones(2, 2), out=torch.zeros(4, 4)).shape == (4, 4)


def test_table_names_every_composite_with_out() -> None:
    found = set()
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            func = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
            if func is not None and any(a.is_out for a in schema_of(func).arguments) and functional_of(func) is not None:
                found.add(f"{packet}.{overload}")
    # Of these two PyTorch's own writes something else to out= than it returns without.
    assert found - {"fft_ihfft2.out", "fft_ihfftn.out"} == set(OUT.split())


@pytest.mark.parametrize("where", [torch.tensor([1, 3]), torch.tensor(3)], ids=["indices", "sections"])
def test_tensor_split_by_a_tensor(where: torch.Tensor) -> None:
    check(lambda x, at: torch.tensor_split(x, at), values(5, 4), where, grad=True, partial=())


def test_numbers_as_tensors_in_factories_under_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (3,))
    programs: list[Callable[[], torch.Tensor]] = [
        lambda: torch.linspace(torch.tensor(-12.0), torch.tensor(3), 7),
        lambda: torch.linspace(1j, 2, 5),
        lambda: torch.arange(torch.tensor(2), torch.tensor(9)),
        lambda: torch.full((3,), torch.tensor(2)),
        lambda: torch.logspace(torch.tensor(0.0), torch.tensor(1.0), 4),
    ]
    for program in programs:
        with dtorch.use_mesh(mesh):
            actual = program()
        same(actual, program(), "under use_mesh")
