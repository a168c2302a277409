"""Redistribution: exact under every pair of placements, on one mesh and across two, and moving no more than it must."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dtorch
from dtorch import DeviceMesh, MeshError, Partial, PlacementError, Replicate, Shard, UsageError, init_device_mesh
from dtorch.core.placements import Placement, balanced
from tests.sharding.harness import place, values
from tests.sharding.placed import assert_holds, every_placement, lopsided, uneven

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule:RuntimeWarning")

R = Replicate()
ONE_AXIS = ((2,), (3,), (4,))
TWO_AXES = ((2, 2), (2, 3))


def check_pairs(
    x: torch.Tensor, sources: Sequence[dtorch.Tensor], targets: Sequence[Sequence[Placement]], mesh: DeviceMesh
) -> None:
    for source, target in itertools.product(sources, targets):
        assert_holds(source.redistribute(mesh, target), x, f"{source.device_mesh} {source.placements} -> {mesh} {target}")


@pytest.mark.parametrize("shape", ONE_AXIS, ids=str)
@pytest.mark.parametrize("dims", [(5, 4), (3,), (1, 2), (0, 3), ()], ids=str)
def test_every_pair_on_one_axis(shape: tuple[int, ...], dims: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", shape)
    x = values(*dims)
    placements = every_placement(mesh, dims)
    check_pairs(x, [place(x, mesh, p) for p in placements], placements, mesh)


@pytest.mark.parametrize("shape", TWO_AXES, ids=str)
@pytest.mark.parametrize("dims", [(7, 4), (5,)], ids=str)
def test_every_pair_on_two_axes(shape: tuple[int, ...], dims: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", shape)
    x = values(*dims)
    placements = every_placement(mesh, dims, ("sum", "max"), (balanced, lopsided))
    check_pairs(x, [place(x, mesh, p) for p in placements], placements, mesh)


@pytest.mark.parametrize("shape", TWO_AXES, ids=str)
def test_partials_of_two_kinds_reduce_the_last_axis_first(shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", shape)
    x = values(5)
    placements = every_placement(mesh, (5,), cuts=(balanced,))
    mixed = [p for p in placements if all(isinstance(q, Partial) for q in p)]
    check_pairs(x, [place(x, mesh, p) for p in mixed], placements, mesh)
    check_pairs(x, [place(x, mesh, p) for p in placements], mixed, mesh)


def test_long_axes() -> None:
    for shape in ((12,), (12, 2), (2, 12)):
        mesh = init_device_mesh("cpu", shape)
        x = values(13, 14)
        rows = every_placement(mesh, (13, 14), (), (balanced,))
        check_pairs(x, [place(x, mesh, p) for p in rows], rows, mesh)


def test_nested_explicit_sizes() -> None:
    mesh = init_device_mesh("cpu", (2, 3))
    x = values(11)
    nested = (Shard(0, (4, 7)), Shard(0, (0, 3, 1, 2, 2, 3)))
    assert [t.tolist() for t in place(x, mesh, nested).shards] == [
        x[a:b].tolist() for a, b in ((0, 0), (0, 3), (3, 4), (4, 6), (6, 8), (8, 11))
    ]
    targets = every_placement(mesh, (11,))
    check_pairs(x, [place(x, mesh, nested)], targets, mesh)
    check_pairs(x, [place(x, mesh, p) for p in targets], [nested], mesh)


@pytest.mark.parametrize("shape", [(1,), (1, 1), (2, 1), (1, 2)], ids=str)
def test_axes_of_one_device(shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", shape)
    x = values(3, 2)
    placements = every_placement(mesh, (3, 2), ("sum", "prod"), (balanced,))
    check_pairs(x, [place(x, mesh, p) for p in placements], placements, mesh)
    with dtorch.explain() as report:
        place(x, mesh, [Shard(0)] * mesh.ndim).redistribute(placements=[R if k == 1 else Shard(0) for k in shape])
    assert not report.events


DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3,), (2, 2)], ids=str)
def test_dtypes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", shape)
    dims = (5, 2) if len(shape) == 1 else (5,)
    x = sample(dims, dtype)
    ops = ("sum", "prod", "avg") if dtype.is_complex else ("sum", "max", "avg", "min", "prod")
    placements = every_placement(mesh, dims, ops if len(shape) == 1 else ops[:2], (balanced,))
    # A partial is made here by redistribution itself: no dtype but the floating ones can be taken apart exactly in every way.
    whole = place(x, mesh, [R] * mesh.ndim)
    check_pairs(x, [whole.redistribute(placements=p) for p in placements], placements, mesh)


def sample(dims: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Values that use the whole range of small integers."""
    if dtype == torch.bool:
        return values(*dims) > 0
    return (
        (values(*dims, dtype=torch.int64) * 6 + 30).to(dtype)
        if dtype in (torch.int8, torch.uint8)
        else values(*dims, dtype=dtype)
    )


def test_a_partial_average_of_small_integers_does_not_overflow() -> None:
    mesh = init_device_mesh("cpu", 3)
    x = torch.tensor([120, -128, 7], dtype=torch.int8)
    made = dtorch.Tensor(x, device_mesh=mesh, placements=[Partial("avg")])
    assert made.to_torch().tolist() == [120, -128, 7]


STRIDED = {
    "transposed": lambda x: x.t(),
    "sliced": lambda x: x[:, 1::2],
    "expanded": lambda x: x[:, :1].expand(-1, 3),
    "permuted": lambda x: x.view(3, 2, 4).permute(2, 0, 1),
}


@pytest.mark.parametrize("view", STRIDED.values(), ids=STRIDED)
def test_sources_that_are_not_contiguous(view: object) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    base = values(6, 4)
    expected = view(base)
    for source in [[R, R], [Shard(1), R], [Shard(0), Shard(1)], [Partial(), Shard(0)]]:
        got = view(place(base, mesh, source))
        check_pairs(expected, [got], every_placement(mesh, expected.shape, ("sum",), (balanced,)), mesh)
        assert got.stride() == expected.stride()


MESHES = {
    "overlapping": lambda: DeviceMesh("cpu", [1, 2, 5]),
    "disjoint": lambda: DeviceMesh("cpu", [4, 5]),
    "same ids, other shape": lambda: DeviceMesh("cpu", [0, 1, 2, 3]),
    "same ids, other order": lambda: DeviceMesh("cpu", [[3, 1], [0, 2]]),
    "same ids, other names": lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
    "one device": lambda: DeviceMesh("cpu", [2]),
    "three axes": lambda: init_device_mesh("cpu", (1, 2, 3)),
}


@pytest.mark.parametrize("other", MESHES.values(), ids=MESHES)
def test_across_meshes(other: object) -> None:
    here, there = init_device_mesh("cpu", (2, 2)), other()
    x = values(5, 4)
    draw = random.Random(0)
    for start, end in ((here, there), (there, here)):
        sources = every_placement(start, (5, 4), cuts=(balanced, lopsided))
        targets = every_placement(end, (5, 4), cuts=(balanced, uneven))
        for _ in range(250):
            a, b = draw.choice(sources), draw.choice(targets)
            check_pairs(x, [place(x, start, a)], [b], end)


def test_across_meshes_of_scalars_and_nothing() -> None:
    here, there = init_device_mesh("cpu", 2), DeviceMesh("cpu", [1, 2, 3])
    for x in (torch.tensor(3.5), torch.empty(0, 3)):
        for a in every_placement(here, x.shape):
            check_pairs(x, [place(x, here, a)], every_placement(there, x.shape), there)


@pytest.mark.parametrize("case", range(40))
def test_gradients_are_those_of_the_identity(case: int) -> None:
    draw = random.Random(case)
    here = init_device_mesh("cpu", draw.choice([(2,), (3,), (2, 2)]))
    there = draw.choice([here, here, DeviceMesh("cpu", [1, 4, 2])])
    a, b = draw.choice(every_placement(here, (5, 4))), draw.choice(every_placement(there, (5, 4)))
    x, w = values(5, 4), values(5, 4, seed=1)

    def second_order(t: torch.Tensor, move: object) -> list[torch.Tensor]:
        t = t.detach().requires_grad_()
        y = move(t * t) * w
        (first,) = torch.autograd.grad((y * y).sum(), t, create_graph=True)
        (second,) = torch.autograd.grad((move(first) * 2).sum(), t)
        return [first.detach(), second]

    got = second_order(place(x, here, a), lambda t: t.redistribute(there, b))
    for g, expected in zip(got, second_order(x, lambda t: t), strict=True):
        assert torch.equal(g.to_torch(), expected), (a, b)


def moved(
    x: torch.Tensor,
    mesh: DeviceMesh,
    source: Sequence[Placement],
    target: Sequence[Placement],
    target_mesh: DeviceMesh | None = None,
) -> list[tuple[str, int]]:
    """(kind, elements that all devices receive) of each collective."""
    placed = place(x, mesh, source)
    with dtorch.explain() as report:
        result = placed.redistribute(target_mesh or mesh, target)
    assert_holds(result, x)
    return [(e.comm.kind, e.comm.nbytes // x.itemsize) for e in report.events]


N = 24  # elements of a (4, 6) tensor

LEAST = [
    ((2,), ["S0"], ["R"], [("all_gather", N)]),
    ((4,), ["S1"], ["R"], [("all_gather", 3 * N)]),
    ((4,), ["P"], ["R"], [("all_reduce", 6 * N)]),
    ((4,), ["P"], ["S0"], [("reduce_scatter", 3 * N)]),
    ((4,), ["max"], ["S0"], [("reduce_scatter", 3 * N)]),
    ((4,), ["S0"], ["S1"], [("all_to_all", 18)]),
    ((4,), ["R"], ["S0"], []),
    ((4,), ["R"], ["P"], []),
    ((4,), ["S0"], ["P"], [("all_gather", 3 * N)]),
    ((2, 2), ["S0", "S1"], ["S1", "S0"], [("exchange", N // 2)]),
    ((2, 2), ["S0", "R"], ["R", "S0"], [("exchange", N)]),
    ((2, 2), ["S0", "S0"], ["R", "S0"], [("exchange", 3 * N // 2)]),
    ((2, 2), ["R", "S0"], ["S0", "S0"], [("exchange", N // 2)]),
    ((2, 2), ["S0", "S0"], ["S0", "R"], [("all_gather", N)]),
    ((2, 2), ["S0", "S0"], ["R", "R"], [("all_gather", N), ("all_gather", 2 * N)]),
    ((2, 2), ["S0", "R"], ["R", "S1"], [("all_gather", N)]),
    ((2, 2), ["P", "R"], ["R", "S0"], [("all_reduce", 2 * N)]),
    ((2, 2), ["P", "S0"], ["R", "R"], [("all_reduce", 2 * N), ("all_gather", 2 * N)]),
    ((2, 2), ["P", "P"], ["S0", "S1"], [("reduce_scatter", 2 * N), ("reduce_scatter", N)]),
    ((2, 2), ["P", "S0"], ["P", "S1"], [("all_to_all", N)]),
    ((2, 2), ["R", "R"], ["S0", "S0"], []),
]


def _named(names: Sequence[str]) -> list[Placement]:
    known = {"R": R, "P": Partial(), "max": Partial("max")}
    return [known[n] if n in known else Shard(int(n[1:])) for n in names]


@pytest.mark.parametrize(("shape", "source", "target", "expected"), LEAST, ids=lambda v: str(v))
def test_the_fewest_bytes_are_moved(
    shape: tuple[int, ...], source: list[str], target: list[str], expected: list[tuple[str, int]]
) -> None:
    got = moved(values(4, 6), init_device_mesh("cpu", shape), _named(source), _named(target))
    assert sorted(got) == sorted(expected)


def test_moving_cuts_within_a_dim_sends_only_what_changes_hands() -> None:
    mesh = init_device_mesh("cpu", 2)
    assert moved(values(6), mesh, [Shard(0, (2, 4))], [Shard(0)]) == [("all_to_all", 1)]
    assert moved(values(6), mesh, [Shard(0, (6, 0))], [Shard(0, (0, 6))]) == [("all_to_all", 6)]


def test_across_meshes_only_missing_elements_are_sent() -> None:
    here, x = init_device_mesh("cpu", 2), values(4, 6)
    assert moved(x, here, [Shard(0)], [Shard(0)], DeviceMesh("cpu", [2, 3])) == [("transfer", N)]
    assert moved(x, here, [R], [R], DeviceMesh("cpu", [2, 3])) == [("transfer", 2 * N)]
    assert moved(x, here, [R], [Shard(1)], DeviceMesh("cpu", [1, 0])) == []
    assert moved(x, here, [Shard(0)], [Shard(0)], DeviceMesh("cpu", [1, 0])) == [("transfer", N)]
    assert moved(x, here, [Shard(0)], [Shard(0)], DeviceMesh("cpu", [0, 1, 2, 3])) == [("transfer", 18)]
    assert moved(x, here, [Shard(0)], [R], DeviceMesh("cpu", [0, 1, 2])) == [("transfer", 2 * N)]
    # Half of what replicating the sum first would move: device 0 lacks half of it, device 1 the other half.
    assert moved(x, here, [Partial()], [Shard(0)], DeviceMesh("cpu", [2, 3])) == [("reduce_scatter", N), ("transfer", N)]


@settings(max_examples=150)
@given(st.data())
def test_no_pair_moves_more_than_gathering_everything(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(2,), (3,), (2, 2), (2, 3), (3, 2), (2, 2, 2)]))
    dims = data.draw(st.lists(st.integers(0, 7), max_size=3))
    mesh = init_device_mesh("cpu", shape)
    choices = (
        every_placement(mesh, dims, ("sum", "min"), (balanced, uneven))
        if len(shape) < 3
        else every_placement(mesh, dims, ("sum",), (balanced,))
    )
    source, target = data.draw(st.sampled_from(choices)), data.draw(st.sampled_from(choices))
    x = values(*dims)
    received = sum(n for _, n in moved(x, mesh, source, target))
    reduces = sum(k - 1 for k, p in zip(shape, source, strict=True) if isinstance(p, Partial))
    assert received <= x.numel() * mesh.size() * (1 + 2 * reduces)
    if source == target:
        assert received == 0


def test_the_result_has_memory_of_its_own() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for source, target in (
        ([R, R], [Shard(0), R]),
        ([Shard(0), R], [R, R]),
        ([R, R], [Partial(), R]),
        ([Shard(0), R], [Shard(0), Shard(1)]),
    ):
        x = place(torch.ones(4, 2), mesh, source)
        y = x.redistribute(placements=target)
        y.mul_(2)
        assert x.to_torch().eq(1).all() and y.to_torch().eq(2).all()


def test_nothing_changes_nothing_happens() -> None:
    x = place(torch.ones(4, 2), init_device_mesh("cpu", 2), [Shard(0)])
    assert x.redistribute(placements=[Shard(-2)]) is x
    assert x.redistribute(placements=[Shard(0, (2, 2))]) is x
    assert x.redistribute() is x


def test_where_no_piece_changes_a_write_is_seen_by_both_and_by_autograd() -> None:
    mesh = init_device_mesh("cpu", (2, 1))
    x = place(torch.ones(4), mesh, [Shard(0), R]).requires_grad_()
    z = x * 1
    y = z.redistribute(placements=[Shard(0), Shard(0)])
    square = z * z
    y.mul_(3)
    assert z.to_torch().tolist() == [3.0] * 4
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()
    (z * y).sum().backward()
    assert x.grad.to_torch().tolist() == [18.0] * 4


def test_placements_are_kept_or_dropped_with_the_mesh() -> None:
    x = place(values(7, 2), init_device_mesh("cpu", 2), [Shard(0, (5, 2))])
    assert x.redistribute(DeviceMesh("cpu", [2, 3])).placements == (Shard(0, (5, 2)),)
    assert x.redistribute(DeviceMesh("cpu", [2, 3, 4])).placements == (Shard(0),)
    assert x.redistribute(init_device_mesh("cpu", (2, 2))).placements == (R, R)


def test_redistribute_like() -> None:
    mesh, other = init_device_mesh("cpu", 2), DeviceMesh("cpu", [1, 2])
    x = place(values(6, 2), mesh, [R])
    like = place(values(6, 2), other, [Shard(0, (1, 5))])
    moved_to = x.redistribute_like(like)
    assert moved_to.device_mesh is other and moved_to.placements == (Shard(0, (1, 5)),)
    assert_holds(moved_to, values(6, 2))
    longer = place(values(8, 3), other, [Shard(0, (1, 7))])
    assert x.redistribute_like(longer).placements == (Shard(0),)
    with pytest.raises(PlacementError, match="shard dim"):
        x.redistribute_like(place(values(2, 2, 4), other, [Shard(2, (1, 3))]))


def test_redistribute_by_dict() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = place(values(4, 6), mesh, [Shard(0), Shard(1)])
    assert x.redistribute_by_dict({"dp": R}).placements == (R, Shard(1))
    assert x.redistribute_by_dict({"dp": Shard(1), "pp": Shard(0)}, default="replicate").placements == (Shard(1), R)
    assert x.redistribute_by_dict({"dp": R, "tp": R}, default="error").placements == (R, R)
    with pytest.raises(UsageError, match="'tp'"):
        x.redistribute_by_dict({"dp": R}, default="error")
    with pytest.raises(UsageError, match="keep"):
        x.redistribute_by_dict({}, default="drop")
    swapped = init_device_mesh("cpu", (2, 3), mesh_dim_names=("tp", "dp"))
    there = x.redistribute_by_dict({}, swapped)
    assert there.device_mesh is swapped and there.placements == (Shard(1), Shard(0))
    assert_holds(there, values(4, 6))


def test_redistribute_by_dict_onto_axes_of_other_length_keeps_the_dim_only() -> None:
    x = place(values(7), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), [Shard(0, (6, 1))])
    assert x.redistribute_by_dict({}, init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))).placements == (Shard(0),)


def test_errors() -> None:
    x = place(values(4, 6), init_device_mesh("cpu", 2), [Shard(0)])
    with pytest.raises(PlacementError, match="one placement per mesh axis"):
        x.redistribute(placements=[R, R])
    with pytest.raises(PlacementError, match="shard dim"):
        x.redistribute(placements=[Shard(2)])
    with pytest.raises(PlacementError, match="add up"):
        x.redistribute(placements=[Shard(0, (1, 2))])
    with pytest.raises(MeshError, match="one mesh"):
        x + x.redistribute(DeviceMesh("cpu", [2, 3]))


def test_a_moved_tensor_lies_without_gaps_in_the_order_it_had() -> None:
    mesh = init_device_mesh("cpu", 2)
    x = place(values(6, 8), mesh, [R])
    for view in (lambda t: t[::2], lambda t: t.t()[1:5], lambda t: t[:, ::3], lambda t: t.view(6, 2, 4).permute(2, 0, 1)[1:3]):
        moved_view = view(x).redistribute(placements=[Shard(0)])
        expected = view(values(6, 8)).clone()
        assert moved_view.stride() == expected.stride()
        assert torch.equal(moved_view.as_strided((2, 2), (2, 1), 1).to_torch(), expected.as_strided((2, 2), (2, 1), 1))
    assert x[:1].expand(4, 8).redistribute(placements=[Shard(1)]).stride() == (8, 1)
