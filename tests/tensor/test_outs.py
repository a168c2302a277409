"""``out=`` of any dtype, shape and memory: accepted, refused, cast and resized as by PyTorch on plain tensors."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard, UsageError, init_device_mesh
from tests.sharding.harness import check, place, same, values

SQUARE = values(5, 5) + 8 * torch.eye(5)
Program = Callable[..., Any]
OPERATORS: dict[str, tuple[Program, tuple[torch.Tensor, ...]]] = {
    "neg": (torch.neg, (values(5, 4),)),
    "add": (torch.add, (values(5, 4), values(4))),
    "add of integers": (torch.add, (values(5, dtype=torch.int64), values(5, dtype=torch.int64, seed=1))),
    "eq": (torch.eq, (values(5, 4), values(5, 4, seed=1))),
    "true_divide": (torch.true_divide, (values(5, dtype=torch.int64), torch.full((5,), 4))),
    "square": (torch.square, (values(5, 4),)),
    "softplus": (torch.ops.aten.softplus.out, (values(5, 4),)),
    "sum": (lambda x, out: torch.sum(x, 0, out=out), (values(5, 4),)),
    "sum of integers": (lambda x, out: torch.sum(x, 0, out=out), (values(5, 4, dtype=torch.int64),)),
    "prod": (lambda x, out: torch.prod(x, 1, out=out), (values(5, 4, dtype=torch.int64),)),
    "nansum": (lambda x, out: torch.nansum(x, 0, out=out), (values(5, 4),)),
    "mean": (lambda x, out: torch.mean(x, 0, out=out), (values(5, 4),)),
    "amax": (lambda x, out: torch.amax(x, 0, out=out), (values(5, 4),)),
    "all": (lambda x, out: torch.all(x, 0, out=out), (values(5, 4) > 0,)),
    "cumsum": (lambda x, out: torch.cumsum(x, 0, out=out), (values(5, 4),)),
    "cumprod": (lambda x, out: torch.cumprod(x, 1, out=out), (values(5, 4, dtype=torch.int64),)),
    "mm": (torch.mm, (values(5, 4), values(4, 3))),
    "matmul": (torch.matmul, (values(5, 4), values(4))),
    "kron": (torch.kron, (values(2, 3), values(2, 2))),
    "cat": (lambda a, b, out: torch.cat([a, b], out=out), (values(3, 4), values(2, 4))),
    "index_select": (lambda x, i, out: torch.index_select(x, 0, i, out=out), (values(5, 4), torch.tensor([3, 1]))),
    "masked_select": (torch.masked_select, (values(5, 4), values(5, 4, seed=1) > 0)),
    "tril": (torch.tril, (values(5, 5),)),
    "cholesky": (torch.linalg.cholesky, (SQUARE @ SQUARE.mT,)),
    "cond": (torch.linalg.cond, (SQUARE,)),
    "matrix_rank": (torch.linalg.matrix_rank, (SQUARE,)),
    "fft": (torch.fft.fft, (values(5, 4),)),
    "hfft2": (torch.fft.hfft2, (values(5, 4),)),
}
OUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{str(d): lambda r, d=d: torch.ones(r.shape, dtype=d) for d in (torch.bool, torch.int64, torch.bfloat16)},
    **{str(d): lambda r, d=d: torch.ones(r.shape, dtype=d) for d in (torch.float32, torch.float64, torch.complex64)},
    "empty": lambda r: torch.ones(0, dtype=r.dtype),
    "empty of another dtype": lambda r: torch.ones(0, dtype=torch.float64),
    "longer": lambda r: torch.ones(r.numel() + 3, dtype=r.dtype),
    "more dims": lambda r: torch.ones(*r.shape, 2, dtype=r.dtype),
    "shorter": lambda r: torch.ones(2, dtype=r.dtype),
}
PLACED = (((2,), (Replicate(),)), ((3,), (Shard(0),)), ((2, 2), (Shard(0), Partial())))


def attempt(fn: Program, *inputs: torch.Tensor, out: torch.Tensor) -> tuple[Any, bool]:
    """What is in ``out=`` afterwards, and whether the call was refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            assert fn(*inputs, out=out) is out
            return out, False
        except (RuntimeError, TypeError):
            return None, True


def placed(t: torch.Tensor, mesh: dtorch.DeviceMesh, placements: tuple[Any, ...]) -> dtorch.Tensor:
    """On the mesh, partial or split where that can be."""
    fit = [Replicate() if (isinstance(p, Shard) and not t.ndim) or not t.is_floating_point() else p for p in placements]
    return place(t, mesh, tuple(fit))


@pytest.mark.parametrize("kind", OUTS)
@pytest.mark.parametrize("name", OPERATORS)
def test_any_out_is_taken_or_refused_as_by_pytorch(name: str, kind: str) -> None:
    fn, inputs = OPERATORS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        right = fn(*inputs, out=torch.empty(0, dtype=_natural(fn, inputs)))
    expected, refused = attempt(fn, *inputs, out=OUTS[kind](right))
    for shape, placements in PLACED:
        mesh = init_device_mesh("cpu", shape)
        where = f"{name} into {kind} under {placements}"
        given = [placed(t, mesh, placements) for t in inputs]
        for out in (placed(OUTS[kind](right), mesh, placements), OUTS[kind](right)):
            got, refused_here = attempt(fn, *given, out=out)
            assert refused_here == refused, where
            if not refused:
                same(got, expected, where, rtol=1e-4, atol=1e-4)


def _natural(fn: Program, inputs: tuple[torch.Tensor, ...]) -> torch.dtype:
    """The dtype of the result, of those that are taken."""
    dtypes = (inputs[0].dtype, torch.float32, torch.bool, torch.int64, torch.complex64)
    if fn is torch.eq:
        return torch.bool
    return next(d for d in dtypes if not attempt(fn, *inputs, out=torch.empty(0, dtype=d))[1])


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1, (1, 3))], ids=str)
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.cumsum(x, 0, out=x),
        lambda x: torch.maximum(x, x.mT.clone(), out=x),
        lambda x: torch.sub(x.clone(), x, out=x),
        lambda x: torch.addmm(x, x.clone(), x.clone(), out=x),
    ],
    ids=["cumsum", "maximum", "sub", "addmm"],
)
def test_out_that_is_an_input(fn: Callable[[torch.Tensor], Any], placement: Any) -> None:
    plain = values(4, 4)
    x = place(plain, init_device_mesh("cpu", (2,)), (placement,))
    fn(plain)
    fn(x)
    same(x, plain, str(placement))


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=str)
def test_out_that_is_an_input_of_another_shape_is_refused(placement: Any) -> None:
    row, x = values(4), values(4, 4)
    mesh = init_device_mesh("cpu", (2,))
    for a, b in ((row, x), (place(row, mesh, (placement,)), place(x, mesh, (placement,)))):
        with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
            torch.add(a, b, out=a)
        same(a, row, "untouched")


def test_a_resized_out_lies_as_the_result_does() -> None:
    mesh = init_device_mesh("cpu", (2,))
    x = dtorch.ones(6, 4, device_mesh=mesh, placements=[Shard(0)])
    out = dtorch.empty(0, device_mesh=mesh)
    with dtorch.communication("forbid"):
        torch.neg(x.mT, out=out)
    assert out.placements == (Shard(1),) and out.stride() == (1, 4)


def test_series_fill_any_shape_of_as_many_elements() -> None:
    mesh = init_device_mesh("cpu", (2,))
    programs: tuple[Callable[[torch.Tensor], Any], ...] = (
        lambda out: torch.arange(6, out=out),
        lambda out: torch.linspace(0, 1, 6, out=out),
        lambda out: torch.logspace(0, 1, 6, out=out),
    )
    for program in programs:
        plain, out = torch.zeros(2, 3), dtorch.zeros(2, 3, device_mesh=mesh, placements=[Shard(1)])
        program(plain)
        program(out)
        same(out, plain, "a series")


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(0, (1, 5))], ids=str)
def test_views_see_what_a_resized_out_gets(placement: Any) -> None:
    def program(base: torch.Tensor, ones: torch.Tensor) -> list[torch.Tensor]:
        part, whole = base[1:4], base.view(2, 3)
        torch.add(ones[:4], 1, out=base)
        base[0] = 7
        part.mul_(2)
        return [base, part, whole]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = program(torch.zeros(6), torch.ones(6))
        mesh = init_device_mesh("cpu", (2,))
        same(program(place(torch.zeros(6), mesh, (placement,)), place(torch.ones(6), mesh, (placement,))), expected, "views")


def test_what_has_live_views_does_not_grow() -> None:
    mesh = init_device_mesh("cpu", (2,))
    out, ones = dtorch.zeros(4, device_mesh=mesh, placements=[Shard(0)]), dtorch.ones(6, device_mesh=mesh)
    part = out[:2]
    with pytest.raises(UsageError, match="of which there are views"):
        torch.neg(ones, out=out)
    with pytest.raises(UsageError, match="of which there are views"):
        out.resize_(6)
    assert part.sum().item() == 0
    del part
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.neg(ones, out=out)
    assert out.shape == (6,) and out.sum().item() == -6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_random_numbers_into_out_are_those_of_plain_tensors(dtype: torch.dtype) -> None:
    mesh, p = init_device_mesh("cpu", (2,)), torch.full((4, 3), 0.5)
    for plain in (torch.zeros(4, 3, dtype=dtype), torch.zeros(3, 4, dtype=dtype).mT):
        out = place(plain.contiguous(), mesh, (Shard(0),))
        out = out if plain.is_contiguous() else place(plain.mT.contiguous(), mesh, (Shard(0),)).mT
        torch.manual_seed(3)
        torch.bernoulli(p, out=plain)
        torch.manual_seed(3)
        torch.bernoulli(place(p, mesh, (Replicate(),)), out=out)
        same(out, plain, f"bernoulli into {dtype}")


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64])
def test_a_partial_sum_in_a_dtype_that_drops_something(dtype: torch.dtype) -> None:
    check(lambda x: (x.sum(0, dtype=dtype), x.sum(dtype=dtype)), values(5, 4), limit=20)


def test_statistics_kept_in_inputs_are_written_and_not_returned() -> None:
    def program(x: Any, mean: Any, variance: Any, *outs: Any) -> Any:
        names = ("out", "save_mean", "save_invstd")
        kept = torch.ops.aten._native_batch_norm_legit.out(
            x, None, None, mean, variance, True, 0.5, 1e-5, **dict(zip(names, outs, strict=True))
        )
        assert len(kept) == 3 and all(a is b for a, b in zip(kept, outs, strict=True))
        return mean, variance, *outs

    def inputs() -> list[torch.Tensor]:
        return [torch.arange(30.0).view(5, 3, 2), torch.ones(3), torch.ones(3), torch.ones(5, 3, 2), torch.ones(3), torch.ones(3)]

    expected = program(*inputs())
    mesh = dtorch.init_device_mesh("cpu", 2)
    for placement in (Replicate(), Shard(0)):
        ours = program(*(dtorch.Tensor(t, device_mesh=mesh, placements=[placement]) for t in inputs()))
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a.to_torch(), b)


def test_views_that_only_a_caught_error_holds_do_not_count() -> None:
    mesh = init_device_mesh("cpu", 2)
    x, y = dtorch.ones(1, 6, device_mesh=mesh, placements=[Shard(1)]), dtorch.ones(4, device_mesh=mesh, placements=[Shard(0)])

    def refused() -> None:
        view = x[:]
        try:
            view.mul_(1j)
        except RuntimeError as error:
            kept = error  # a cycle: the error has this frame, and the frame the error
            assert kept.__traceback__ is not None

    gc.disable()
    try:
        refused()
        torch.stack([y, y], out=x)
    finally:
        gc.enable()
    assert x.shape == (2, 4) and x.to_torch().eq(1).all()
