"""``local_map`` and ``register_rule``: functions and operators of the user's own, against plain PyTorch."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Partial, PlacementError, RemoteError, Replicate, Shard, UsageError, explain, init_device_mesh, local_map
from dtorch.core.placements import Placement
from dtorch.sharding.call import OpCall
from dtorch.sharding.labels import Labels

R, P = Replicate(), Partial()
LINE = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
GRID = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
UNEVEN = Shard(0, sizes=(4, 0, 1))


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w)


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


Case = tuple[Callable[..., torch.Tensor], dtorch.DeviceMesh, list[Placement], list[Placement], list[Placement]]
PRODUCTS: list[Case] = [
    (product, LINE, [R], [R], [R]),
    (product, LINE, [Shard(0)], [R], [Shard(0)]),
    (product, LINE, [UNEVEN], [R], [UNEVEN]),
    (product, LINE, [R], [Shard(1)], [Shard(1)]),
    (linear, LINE, [Shard(1)], [Shard(0)], [P]),
    (linear, LINE, [P], [R], [P]),
    (product, GRID, [Shard(0), R], [R, Shard(1)], [Shard(0), Shard(1)]),
    (product, GRID, [Shard(0), Shard(0)], [R, R], [Shard(0), Shard(0)]),
    (linear, GRID, [Shard(0), Shard(1)], [R, Shard(0)], [Shard(0), P]),
    (linear, GRID, [Shard(1), R], [Shard(0), Shard(1)], [P, Shard(1)]),
    (product, GRID, [R, Shard(0)], [R, R], [R, Shard(0)]),
]


def placements_of(mesh: dtorch.DeviceMesh) -> list[list[Placement]]:
    choices: list[list[Placement]] = [[R] * mesh.ndim, [Shard(0)] + [R] * (mesh.ndim - 1), [Shard(1)] * mesh.ndim]
    return [*choices, [P] + [R] * (mesh.ndim - 1)]


@pytest.mark.parametrize(("fn", "mesh", "x_in", "w_in", "out"), PRODUCTS)
@pytest.mark.parametrize("before", range(4))
def test_results_and_gradients_are_those_of_the_whole(
    fn: Callable[..., torch.Tensor],
    mesh: dtorch.DeviceMesh,
    x_in: list[Placement],
    w_in: list[Placement],
    out: list[Placement],
    before: int,
) -> None:
    torch.manual_seed(0)
    plain = [torch.randn(5, 4, requires_grad=True), torch.randn(4, 7, requires_grad=True)]
    ours = [dtorch.Tensor(t.detach(), device_mesh=mesh, placements=placements_of(mesh)[before]).requires_grad_() for t in plain]
    result, expected = local_map(fn, [x_in, w_in], out)(*ours), fn(*plain)
    assert result.placements == tuple(out)
    torch.testing.assert_close(result.to_torch(), expected.detach())
    for program in (result, expected):
        (program.sin() * 3).sum().backward()
    for a, b in zip(ours, plain, strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad.to_torch(), b.grad)


def test_a_replicated_result_counts_once() -> None:
    plain = torch.randn(6, 2, requires_grad=True)
    x = dtorch.Tensor(plain.detach(), device_mesh=GRID).requires_grad_()
    y = dtorch.randn(6, 2, device_mesh=GRID, placements=[Shard(0), R])
    doubled, sums = local_map(lambda a, b: (a * 2, a.sum(0)), [[R, R], [Shard(0), R]], [[R, R], [R, R]])(x, y)
    (doubled.sum() + (sums * sums).sum()).backward()
    ((plain * 2).sum() + (plain.sum(0) ** 2).sum()).backward()
    assert x.grad is not None and plain.grad is not None
    torch.testing.assert_close(x.grad.to_torch(), plain.grad)


def test_results_without_gradients_and_unused_arguments() -> None:
    x = dtorch.arange(6.0, device_mesh=LINE, requires_grad=True)
    y = dtorch.ones(6, device_mesh=LINE, requires_grad=True)
    fn = local_map(lambda a, b: (a.detach(), a.long(), a * 3), [[Shard(0)]] * 2, [[Shard(0)]] * 3)
    kept, integers, tripled = fn(x, y)
    assert integers.tolist() == list(range(6)) and not integers.requires_grad
    (kept.sum() + tripled.sum()).backward()
    assert x.grad is not None and x.grad.tolist() == [3.0] * 6
    assert y.grad is not None and y.grad.tolist() == [0.0] * 6


def noted(directory: Path) -> list[str]:
    """What a function has written down, wherever it ran."""
    return sorted(file.read_text() for file in directory.iterdir())


def test_a_function_that_meta_tensors_cannot_run_is_asked_of_the_workers(tmp_path: Path) -> None:
    x = dtorch.arange(7, device_mesh=LINE, placements=[Shard(0)])

    def kernel(local: torch.Tensor) -> torch.Tensor:
        (tmp_path / str(uuid.uuid4())).write_text("meta" if local.is_meta else str(len(local)))
        return torch.from_numpy(local.numpy() * 2)[local.numpy() % 2 == 0]

    result = local_map(kernel, [[Shard(0)]], [Shard(0)])(x)
    assert result.shape == (4,) and result.tolist() == [0, 4, 8, 12]
    assert [result.local_shape((i,)) for i in range(3)] == [(2,), (1,), (1,)]
    assert noted(tmp_path) == ["2", "2", "3", "meta"]


def test_equal_pieces_are_run_once_by_a_worker_and_results_never_alias(tmp_path: Path) -> None:
    x = dtorch.zeros(4, device_mesh=GRID)

    def same(local: torch.Tensor) -> torch.Tensor:
        (tmp_path / str(uuid.uuid4())).write_text("meta" if local.is_meta else "run")
        return local

    y = local_map(same, [[R, R]], [R, R])(x)
    y += 1
    assert x.tolist() == [0] * 4 and y.tolist() == [1] * 4
    assert noted(tmp_path) == ["meta", *["run"] * int(os.environ.get("DTORCH_WORKERS") or 1)]


def test_results_lie_in_the_order_of_their_dims() -> None:
    x = dtorch.arange(6.0, device_mesh=LINE).view(2, 3)
    y = local_map(lambda t: t.t(), [[R]], [R])(x)
    assert y.stride() == (2, 1) and y.view(6).tolist() == [0, 3, 1, 4, 2, 5]


def test_only_what_is_declared_is_communicated() -> None:
    x = dtorch.randn(6, 4, device_mesh=GRID, placements=[Shard(0), R])
    fn = local_map(lambda t: t * 2, [[Shard(0), R]], [Shard(0), R])
    with explain() as report, dtorch.communication("forbid"):
        fn(x)
    assert not report.events


def test_plain_tensors_and_other_arguments() -> None:
    fn = local_map(lambda a, n, b: a * n + b, [[Shard(0)], None, [Shard(0)]], [Shard(0)], LINE)
    assert fn(torch.ones(4), 3, dtorch.ones(4, device_mesh=LINE)).tolist() == [4.0] * 4


def test_a_failure_tells_the_line_and_spares_the_session() -> None:
    def broken(local: torch.Tensor) -> torch.Tensor:
        if not local.is_meta:
            raise ValueError("out of luck")
        return local

    y = local_map(broken, [[Shard(0)]], [Shard(0)])(dtorch.ones(3, device_mesh=LINE))
    with pytest.raises(RemoteError, match="out of luck") as caught:
        y.to_torch()
    assert __file__ in str(caught.value) and "broken" in str(caught.value)
    assert dtorch.ones(2, device_mesh=LINE).tolist() == [1, 1]


def square() -> dtorch.Tensor:
    return dtorch.ones(4, 4, device_mesh=LINE)


BAD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: local_map(product, [[R]], [R])(square(), square()), UsageError, "1 in_placements"),
    (lambda: local_map(product, [[R], None], [R])(square(), 3, 4), UsageError, "in_placements"),
    (lambda: local_map(lambda n: n, [None], [R])(3), UsageError, "one of them a tensor"),
    (lambda: local_map(lambda t: t, [[R, R]], [R])(square()), PlacementError, "placements"),
    (lambda: local_map(lambda t: (t, t), [[R]], [R])(square()), UsageError, "2 tensors"),
    (lambda: local_map(lambda t: t, [[Shard(0)]], [R])(square()), PlacementError, "declare how"),
    (lambda: local_map(lambda t: t, [[Shard(0)]], [Shard(7)])(square()), PlacementError, "7"),
]


@pytest.mark.parametrize(("program", "error", "text"), BAD)
def test_what_does_not_fit_is_refused(program: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        program()


@pytest.mark.parametrize(("fn", "mesh", "x_in", "w_in", "out"), PRODUCTS)
def test_gradients_have_gradients(
    fn: Callable[..., torch.Tensor], mesh: dtorch.DeviceMesh, x_in: list[Placement], w_in: list[Placement], out: list[Placement]
) -> None:
    torch.manual_seed(1)
    plain = [torch.randn(5, 4, requires_grad=True), torch.randn(4, 7, requires_grad=True)]
    ours = [dtorch.Tensor(t.detach(), device_mesh=mesh).requires_grad_() for t in plain]
    for tensors, program in ((ours, local_map(fn, [x_in, w_in], out)), (plain, fn)):
        grads = torch.autograd.grad(program(*tensors).sin().sum(), tensors, create_graph=True)
        sum((g * g).sum() for g in grads).backward()
    for a, b in zip(ours, plain, strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad.to_torch(), b.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("draw", [lambda t: torch.dropout(t, 0.5, True), lambda t: t + torch.rand(1).item()])
def test_random_numbers_are_refused_and_the_generator_is_left_alone(draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
    before = torch.get_rng_state()
    with pytest.raises((UsageError, RemoteError), match="random numbers"):
        local_map(draw, [[Shard(0)]], [Shard(0)])(dtorch.ones(6, device_mesh=LINE)).to_torch()
    assert torch.equal(before, torch.get_rng_state())


def test_the_gradient_of_a_largest_value_is_refused() -> None:
    x = dtorch.ones(6, device_mesh=LINE, requires_grad=True)
    with pytest.raises(UsageError, match="only sums and averages"):
        local_map(lambda t: t.amax(0), [[Shard(0)]], [Partial("max")])(x).backward()


@torch.library.custom_op("dtorch_test::row_sums", mutates_args=())
def row_sums(x: torch.Tensor) -> torch.Tensor:
    return x.sum(1)


row_sums.register_fake(lambda x: x.new_empty(x.shape[0]))


@pytest.mark.filterwarnings("ignore:.*has no sharding rule:RuntimeWarning")
def test_a_rule_holds_from_its_registration_on() -> None:
    x = torch.randn(5, 7)
    for mesh in (LINE, GRID):
        for dim in (0, 1):
            placed = dtorch.Tensor(x, device_mesh=mesh, placements=[R] * (mesh.ndim - 1) + [Shard(dim)])
            with explain() as report:
                torch.testing.assert_close(row_sums(placed).to_torch(), row_sums(x))
            assert report.replicated

    @dtorch.register_rule(row_sums)
    def rule(call: OpCall) -> Labels:
        return Labels(["mk"], ["m"], reduce={"k": "sum"})

    for mesh in (LINE, GRID):
        for dim, out in ((0, Shard(0)), (1, P)):
            placed = dtorch.Tensor(x, device_mesh=mesh, placements=[R] * (mesh.ndim - 1) + [Shard(dim)])
            with explain() as report:
                sums = row_sums(placed)
            assert sums.placements[-1] == out and not report.events and not report.replicated
            torch.testing.assert_close(sums.to_torch(), row_sums(x))


@pytest.mark.parametrize("op", [torch.ops.aten.add, "add", "aten::add", 3])
def test_a_rule_is_for_an_operator_of_ones_own(op: Any) -> None:
    with pytest.raises(UsageError, match="operator of your own"):
        dtorch.register_rule(op)
    for named in (torch.ops.dtorch_test.row_sums, torch.ops.dtorch_test.row_sums.default, "dtorch_test::row_sums"):
        dtorch.register_rule(named)
