"""Attention over a split sequence against plain torch: rings, Ulysses and both, with gradients, and what they move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import DeviceMesh, Replicate, Shard, init_device_mesh
from dtorch.core.placements import Partial, Placement
from dtorch.core.spec import Spec
from dtorch.sharding.infer import infer_outputs
from dtorch.sharding.planner import plan_call
from dtorch.tensor.watch import Report
from tests.sharding.harness import check, place, run, same, values

INF = float("inf")
MESHES: dict[str, tuple[int, ...]] = {
    "ring_cp": (3,),
    "ulysses_cp": (3,),
    "anything": (4,),
    "ulysses_cp,ring_cp": (2, 2),
    "ring_cp,ulysses_cp": (2, 3),
    "dp,ring_cp": (2, 2),
    "ulysses_cp,tp": (2, 2),
    "tp,ring_cp": (2, 3),
    "dp,tp,ring_cp,ulysses_cp": (2, 2, 2, 2),
}
RINGS = {"ring_cp": (2,), "ulysses_cp": (2,), "ring_cp,ulysses_cp": (2, 2)}
EACH = pytest.mark.parametrize("names", MESHES)
FEW = pytest.mark.parametrize("names", RINGS)


def mesh_of(names: str, shape: Sequence[int] | None = None) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(shape or MESHES[names]), mesh_dim_names=tuple(names.split(",")))


def split(mesh: DeviceMesh) -> tuple[Placement, ...]:
    """Batch over dp, heads over tp, positions over all other axes."""
    return tuple({"dp": Shard(0), "tp": Shard(1)}.get(name, Shard(2)) for name in mesh.axis_names())


def qkv(heads: int = 6, groups: int = 3, queries: int = 13, keys: int = 13, **options: Any) -> list[torch.Tensor]:
    shapes = ((2, heads, queries, 4), (2, groups, keys, 4), (2, groups, keys, 4))
    return [values(*shape, seed=seed, **options) for seed, shape in enumerate(shapes)]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    mask = mask if mask is None else mask.detach()
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=q.shape[1] != k.shape[1], **options)


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attend(q, k, v, is_causal=True)


def agree(
    fn: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor],
    mesh: DeviceMesh,
    placements: Sequence[Sequence[Placement]] | None = None,
    tolerance: float | None = None,
) -> Report:
    """Output and gradients as plain torch has them, and no input gathered; what was moved.

    Args:
        placements: of each input; split along positions when omitted, a mask whole.
    """
    whole = (Replicate(),) * mesh.ndim
    placements = placements or [split(mesh)] * 3 + [whole] * (len(inputs) - 3)
    given = [place(t, mesh, tuple(p)) for t, p in zip(inputs, placements, strict=True)]
    with dtorch.explain() as report:
        result = run(fn, given, True)
    same(result, run(fn, inputs, True), f"on {mesh!r} with {placements}", tolerance, tolerance)
    assert not [e for e in report.events if e.comm.kind == "all_gather"], report
    assert not report.replicated
    return report


def kinds(fn: Callable[[], Any]) -> Counter[str]:
    """Collectives of a call, by kind."""
    with dtorch.explain() as report:
        fn()
    return Counter(e.comm.kind for e in report.events)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("fn", [causal, attend])
@EACH
def test_meshes_and_dtypes(names: str, fn: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    inputs = [t.to(dtype) for t in qkv(heads=12, groups=4)]
    agree(fn, inputs, mesh_of(names), tolerance={torch.bfloat16: 3e-2, torch.float32: 1e-5}.get(dtype))


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (2, 1), (3, 3), (4, 2), (8, 2), (9, 3)])
@pytest.mark.parametrize("names", ["ring_cp", "ulysses_cp", "ulysses_cp,tp", "ring_cp,ulysses_cp"])
def test_heads_fewer_than_devices_and_uneven(names: str, heads: int, groups: int) -> None:
    agree(causal, qkv(heads, groups), mesh_of(names), tolerance=1e-5)
    agree(attend, qkv(heads, groups), mesh_of(names), tolerance=1e-5)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (2, 2), (1, 9), (9, 1), (5, 12), (12, 5), (16, 16)])
@FEW
def test_lengths(names: str, queries: int, keys: int) -> None:
    mesh = mesh_of(names, RINGS[names])
    for fn in (causal, attend):
        agree(fn, qkv(queries=queries, keys=keys), mesh, tolerance=1e-5)


CUTS = [[(13, 0, 0)] * 3, [(0, 13, 0), (4, 0, 9), (4, 0, 9)], [(1, 1, 11), (5, 5, 3), (0, 1, 12)]]


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("name", ["ring_cp", "ulysses_cp", "anything"])
def test_uneven_and_empty_pieces(name: str, cuts: list[tuple[int, ...]]) -> None:
    for fn in (causal, attend):
        agree(fn, qkv(), mesh_of(name, (3,)), [[Shard(2, cut)] for cut in cuts], tolerance=1e-5)


def test_a_scale() -> None:
    agree(lambda q, k, v: attend(q, k, v, scale=0.3, is_causal=True), qkv(), mesh_of("ring_cp"), tolerance=1e-5)
    agree(lambda q, k, v: attend(q, k, v, scale=0.3), qkv(), mesh_of("ulysses_cp,ring_cp"), tolerance=1e-5)


MASKS = [(13, 9), (1, 9), (13, 1), (2, 6, 13, 9), (2, 1, 13, 9), (1, 6, 13, 9), (2, 1, 1, 9), (2, 6, 13, 1)]


@pytest.mark.parametrize("shape", MASKS)
@pytest.mark.parametrize("boolean", [False, True])
@FEW
def test_masks(names: str, boolean: bool, shape: tuple[int, ...]) -> None:
    mask = values(*shape, seed=3)
    agree(attend, [*qkv(keys=9), mask > -1 if boolean else mask], mesh_of(names, RINGS[names]), tolerance=1e-5)


@FEW
def test_masks_split_along_queries_or_keys(names: str) -> None:
    mesh, mask = mesh_of(names, RINGS[names]), values(2, 1, 13, 13, seed=3)
    for dim in (2, 3):
        agree(attend, [*qkv(), mask], mesh, [split(mesh)] * 3 + [[Shard(dim)] * mesh.ndim], tolerance=1e-5)


@pytest.mark.parametrize("hidden", [-INF, torch.finfo(torch.float32).min, -1e9])
@FEW
def test_rows_that_see_nothing_are_as_the_plain_kernel_has_them(names: str, hidden: float) -> None:
    mask = torch.where(values(1, 1, 13, 13, seed=3) > 0, 0.0, hidden)
    mask[..., 3, :] = mask[..., 8, :] = hidden
    mask[..., 5, :7] = hidden
    mask[..., 6, 7:] = hidden
    agree(attend, [*qkv(), mask], mesh_of(names, RINGS[names]), tolerance=1e-5)


def test_huge_scores_of_a_mask_weigh_as_in_one_block() -> None:
    mask = values(13, 13, seed=3) * 4
    mask[::2] += 3e4
    agree(attend, [*qkv(), mask], mesh_of("ring_cp"), tolerance=2e-3)


def test_a_mask_with_a_gradient_and_dropout_take_the_plain_way() -> None:
    mesh = mesh_of("ring_cp")
    placed = [place(t, mesh, split(mesh)) for t in qkv()]
    mask = values(2, 1, 13, 13, seed=3)

    def with_mask(*inputs: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*inputs, enable_gqa=True)

    whole = place(mask, mesh, (Replicate(),))
    same(run(with_mask, [*placed, whole], True), run(with_mask, [*qkv(), mask], True), "with a mask")


@pytest.mark.parametrize("names", ["ring_cp", "ulysses_cp", "ring_cp,ulysses_cp"])
def test_dropout_draws_what_plain_torch_draws(names: str) -> None:
    mesh = mesh_of(names)

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(5)
        return attend(q, k, v, dropout_p=0.4, is_causal=True)

    placed = [place(t, mesh, split(mesh)) for t in qkv()]
    same(run(fn, placed, True), run(fn, qkv(), True), f"on {mesh!r}", 1e-5, 1e-5)


@pytest.mark.parametrize("fn", [causal, attend])
@pytest.mark.parametrize("names", ["ring_cp", "ulysses_cp"])
def test_any_placements(names: str, fn: Callable[..., torch.Tensor]) -> None:
    for shape in ((2,), (2, 2)):
        mesh = mesh_of(names if len(shape) == 1 else f"{names},other", shape)
        check(fn, *qkv(4, 2, 5, 5), grad=True, limit=12, meshes=[mesh], rtol=1e-5, atol=1e-5)


def test_results_lie_where_the_queries_do() -> None:
    mesh = mesh_of("ulysses_cp,ring_cp")
    q, k, v = (place(t, mesh, split(mesh)).requires_grad_() for t in qkv())
    out = causal(q, k, v)
    assert out.placements == split(mesh)
    assert all(g.placements == split(mesh) for g in torch.autograd.grad(out, (q, k, v), out.detach()))


def test_queries_split_and_keys_whole_move_nothing() -> None:
    mesh = mesh_of("ring_cp")
    q, k, v = (place(t, mesh, p).requires_grad_() for t, p in zip(qkv(), [(Shard(2),), *[(Replicate(),)] * 2], strict=True))
    moved = kinds(lambda: causal(q, k, v))
    assert not moved
    out = causal(q, k, v)
    assert [g.placements for g in torch.autograd.grad(out, (q, k, v), out.detach())] == [(Shard(2),), (Partial(),), (Partial(),)]


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_a_ring_takes_one_exchange_less_than_it_has_devices(devices: int) -> None:
    mesh = mesh_of("ring_cp", (devices,))
    q, k, v = (place(t, mesh, split(mesh)).requires_grad_() for t in qkv(queries=16, keys=16))
    assert kinds(lambda: attend(q, k, v)) == {"ring_shift": devices - 1}
    # Positions go to balanced places and back: queries, keys, values, and the output.
    assert kinds(lambda: causal(q, k, v)) == {"ring_shift": devices - 1, "all_to_all": 4}
    out = attend(q, k, v)
    # Keys with values, and their gradients, which end one device before home; from there it is a step of its own.
    moved = kinds(lambda: torch.autograd.grad(out, (q, k, v), out.detach()))
    assert moved == {"ring_shift": 2 * (devices - 1), "all_to_all": 1}


@pytest.mark.parametrize("devices", [2, 3])
def test_ulysses_takes_three_exchanges_in_and_one_out(devices: int) -> None:
    mesh = mesh_of("ulysses_cp", (devices,))
    q, k, v = (place(t, mesh, split(mesh)) for t in qkv(6, 6))
    with dtorch.explain() as report:
        causal(q, k, v)
    assert Counter(e.comm.kind for e in report.events) == {"all_to_all": 4}
    # Each device keeps its share of what it had. The log-sum-exp goes back with the output: one number beside four.
    assert report.nbytes == (4 + 1 / 4) * q._spec.nbytes * (devices - 1) / devices


def test_both_take_four_exchanges_and_the_steps_of_the_ring() -> None:
    mesh = mesh_of("ulysses_cp,ring_cp")
    q, k, v = (place(t, mesh, split(mesh)) for t in qkv())
    assert kinds(lambda: causal(q, k, v)) == {"all_to_all": 4, "ring_shift": 1}


def test_an_axis_without_a_meaning_takes_what_moves_less() -> None:
    mesh = init_device_mesh("cpu", (4,))

    def moved(heads: int, groups: int) -> Counter[str]:
        q, k, v = (place(t, mesh, (Shard(2),)) for t in qkv(heads, groups, 16, 16))
        return kinds(lambda: attend(q, k, v))

    assert moved(8, 8) == {"all_to_all": 4}
    assert moved(2, 2) == {"ring_shift": 3}
    assert moved(32, 1) == {"ring_shift": 3}


@pytest.mark.parametrize("names", ["ring_cp", "ulysses_cp", "ring_cp,ulysses_cp"])
def test_few_queries_and_many_split_keys_leave_the_keys_where_they_are(names: str) -> None:
    mesh = mesh_of(names)
    whole, inputs = (Replicate(),) * mesh.ndim, qkv(queries=1, keys=17)
    placements = [whole, split(mesh), split(mesh)]
    agree(attend, inputs, mesh, placements, tolerance=1e-5)
    agree(attend, [*inputs, values(2, 1, 1, 17) > 0], mesh, [*placements, whole], tolerance=1e-5)
    q, k, v = (place(t, mesh, p) for t, p in zip(inputs, placements, strict=True))
    # The greatest scores, then outputs with their weights.
    assert kinds(lambda: attend(q, k, v)) == {"all_reduce": 2 * mesh.ndim}
    assert attend(q, k, v).placements == whole


def test_few_queries_of_one_ring_each() -> None:
    mesh = mesh_of("ring_cp,ulysses_cp", (2, 2))
    placements = [(Shard(2), Replicate()), split(mesh), split(mesh)]
    for fn in (causal, attend):
        agree(fn, qkv(queries=3, keys=17), mesh, placements, tolerance=1e-5)


@pytest.mark.parametrize("dim", [0, 1])
def test_devices_without_a_sequence_or_a_head_are_idle(dim: int) -> None:
    mesh = mesh_of("any", (4,))
    for fn in (causal, attend):
        report = agree(fn, qkv(3, 3), mesh, [[Shard(dim)]] * 3, tolerance=1e-5)
        assert not [e for e in report.events if "attention" in e.comm.operator]


def kernel_args(name: str, spec: Callable[..., Spec], keys: int) -> dict[str, tuple]:
    """Arguments of a CUDA kernel, forward and backward, for sixteen queries."""
    q, k, rows, one = spec(2, 4, 16, 8), spec(2, 2, keys, 8), spec(2, 4, 16, dtype=torch.float32), spec(whole=True)
    if name == "flash":
        return {"": (q, k, k), "_backward": (q, q, k, k, q, rows, None, None, 16, keys, 0.0, False, spec(2, whole=True), one)}
    if name == "cudnn":
        back = (q, q, k, k, q, rows, one, one, None, None, None, 16, keys, 0.0, False)
        return {"": (q, k, k, None, True), "_backward": back}
    # As PyTorch gives it, the log-sum-exp of this kernel has a multiple of 32 positions.
    mask, rows = spec(2, 4, 16, keys, whole=True), spec(2, 4, 32, dtype=torch.float32, whole=True)
    return {"": (q, k, k, mask, True), "_backward": (q, q, k, k, mask, q, rows, one, one, 0.0, [True, True, True, False])}


@pytest.mark.parametrize("axis", ["ring_cp", "ulysses_cp"])
@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
def test_cuda_kernels_are_planned_alike(name: str, axis: str) -> None:
    mesh = init_device_mesh("cuda", (4,), mesh_dim_names=(axis,))

    def spec(*shape: int, dtype: torch.dtype = torch.float16, whole: bool = False) -> Spec:
        return Spec.make(mesh, [Replicate() if whole else Shard(2)], shape, dtype)

    for suffix, args in kernel_args(name, spec, 12).items():
        func = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention{suffix}").default
        plan = plan_call(func, args, {})
        assert plan.how == "program"
        assert "all_gather" not in {c.kind for c in plan.comms}
        assert sum(c.kind == "ring_shift" for c in plan.comms) == {"ring_cp": 6 if suffix else 3}.get(axis, 0)
        assert [o.placements for o in plan.outs[:1]] == [(Shard(2),)]
        metas, _ = infer_outputs(func, args, {})
        assert [(o.shape, o.dtype) for o in plan.outs] == [(m.shape, m.dtype) for m in metas]
