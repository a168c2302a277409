"""Specs: canonical and interned; local boxes cover every element exactly once, whatever the placements."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtorch import DeviceMesh, Partial, PlacementError, Replicate, Shard, init_device_mesh
from dtorch.core.mesh import coordinates
from dtorch.core.placements import balanced
from dtorch.core.spec import Spec, contiguous_stride, fitting_placements

R = Replicate()
MESH = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))


def make(placements: list, shape: tuple[int, ...] = (7, 4), mesh: object = MESH) -> Spec:
    return Spec.make(mesh, placements, shape, torch.float32)


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Any mesh of up to three axes, any shape, any placements, explicit sizes among them."""
    mesh = init_device_mesh("cpu", draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)))
    shape = draw(st.lists(st.integers(0, 6), max_size=3).map(tuple))
    placements: list = []
    for axis, k in enumerate(mesh.shape):
        kinds = ["replicate", "partial", *(["even", "sizes"] if shape else [])]
        kind = draw(st.sampled_from(kinds))
        if kind in ("replicate", "partial"):
            placements.append(R if kind == "replicate" else Partial(draw(st.sampled_from(["sum", "avg", "max", "min", "prod"]))))
            continue
        dim = draw(st.integers(0, len(shape) - 1))
        so_far = Spec.make(mesh, [*placements, *[R] * (mesh.ndim - axis)], shape, torch.float32)
        axes = so_far.sharding_axes(dim)
        lengths = so_far.sizes_on(axes[-1]) if axes else (shape[dim],)
        sizes = tuple(size for n in lengths for size in draw(cuts(n, k)))
        placements.append(Shard(dim - draw(st.sampled_from([0, len(shape)])), None if kind == "even" else sizes))
    return Spec.make(mesh, placements, shape, torch.float32)


def cuts(n: int, k: int) -> st.SearchStrategy[tuple[int, ...]]:
    """k lengths that add up to n."""
    points = st.lists(st.integers(0, n), min_size=k - 1, max_size=k - 1).map(sorted)
    return points.map(lambda p: tuple(b - a for a, b in zip([0, *p], [*p, n], strict=True)))


@settings(max_examples=400)
@given(specs())
def test_local_boxes_cover_every_element_exactly_once(spec: Spec) -> None:
    """Among the devices that differ along sharding axes only, each element has one home."""
    sharding = [a for a, p in enumerate(spec.placements) if isinstance(p, Shard)]
    groups: dict[tuple, torch.Tensor] = {}
    for coord in coordinates(spec.mesh.shape):
        others = tuple(c for a, c in enumerate(coord) if a not in sharding)
        covered = groups.setdefault(others, torch.zeros(spec.shape, dtype=torch.int64))
        offset, size = spec.local_box(coord)
        covered[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))] += 1
    for covered in groups.values():
        assert covered.eq(1).all()


@settings(max_examples=200)
@given(specs())
def test_pieces_are_numbered_row_major_over_the_axes_that_differ(spec: Spec) -> None:
    assert [
        spec.piece_of(c) for c in coordinates(spec.mesh.shape) if not any(x for a, x in enumerate(c) if a not in spec.axes)
    ] == list(range(len(spec.boxes)))
    assert all(spec.mesh.shape[a] > 1 and spec.placements[a] != R for a in spec.axes)
    for coord in coordinates(spec.mesh.shape):
        assert spec.local_box(coord) == spec.boxes[spec.piece_of(coord)]


@settings(max_examples=200)
@given(specs())
def test_canonical_form_is_a_fixed_point(spec: Spec) -> None:
    assert spec.replace(spec.placements) is spec
    assert fitting_placements(spec.mesh, spec.placements, spec.shape) == spec.placements
    for p in spec.placements:
        assert not isinstance(p, Shard) or p.dim >= 0


def test_equal_specs_are_one_object() -> None:
    assert make([Shard(0), R]) is make([Shard(-2), R]) is make([Shard(0, (4, 3)), R])
    assert make([Shard(0), R]) is not make([Shard(0, (3, 4)), R])
    assert make([R, R]) is Spec.make(MESH, [R, R], torch.Size([7, 4]), torch.float32, (4, 1))
    assert make([R, R]) is not Spec.make(MESH, [R, R], (7, 4), torch.float32, (1, 7))
    assert make([R, R]) is not Spec.make(MESH, [R, R], (7, 4), torch.float64)


def test_specs_are_dropped_with_their_last_user() -> None:
    ref = weakref.ref(make([R, R], (123, 457)))
    gc.collect()
    assert ref() is None


def test_no_shard_is_empty_while_there_are_enough_elements() -> None:
    spec = Spec.make(init_device_mesh("cpu", 4), [Shard(0)], (5, 10), torch.float32)
    assert [size[0] for _, size in spec.boxes] == [2, 1, 1, 1]


def test_two_axes_on_one_dim_split_the_outer_first() -> None:
    spec = make([Shard(0), Shard(0)], (16,))
    assert [(o[0], n[0]) for o, n in spec.boxes] == [(0, 3), (3, 3), (6, 2), (8, 3), (11, 3), (14, 2)]
    assert spec.sizes_on(0) == (8, 8) and spec.sizes_on(1) == (3, 3, 2, 3, 3, 2)


def test_nested_explicit_sizes() -> None:
    spec = make([Shard(0, (4, 3)), Shard(0, (0, 4, 0, 1, 1, 1))])
    assert [n[0] for _, n in spec.boxes] == [0, 4, 0, 1, 1, 1]
    assert spec.placements == (Shard(0), Shard(0, (0, 4, 0, 1, 1, 1)))


def test_partial_axes_and_bytes() -> None:
    spec = make([Partial("max"), Shard(1)])
    assert spec.partial_axes == (0,) and spec.axes == (0, 1) and spec.piece_grid == (2, 3)
    assert spec.nbytes == 7 * 4 * 4
    one = Spec.make(init_device_mesh("cpu", (1, 2)), [Partial(), R], (3,), torch.float32)
    assert one.partial_axes == one.axes == ()


@pytest.mark.parametrize(
    ("placements", "rule"),
    [
        ([R], "one placement per mesh axis"),
        ([R, R, R], "one placement per mesh axis"),
        ([Shard(2), R], r"lies in \[-2, 1\]"),
        ([R, Shard(-3)], "lies in"),
        ([Shard(0, (4, 4)), R], r"2 non-negative lengths that add up to \[7\]"),
        ([Shard(0, (8, -1)), R], "non-negative"),
        ([R, Shard(0, (4, 3))], "3 non-negative lengths"),
        ([Shard(0), Shard(0, (7, 0, 0))], r"6 non-negative lengths that add up to \[4, 3\]"),
        (["S0", R], "a placement is"),
        ([None, R], "a placement is"),
    ],
)
def test_refusals(placements: list, rule: str) -> None:
    with pytest.raises(PlacementError, match=rule) as raised:
        make(placements)
    assert [line.split(":")[0].strip() for line in str(raised.value).splitlines()][1:] == ["rule", "where", "to do"]


def test_the_refusal_names_the_axis() -> None:
    with pytest.raises(PlacementError, match="axis 'tp'"):
        make([R, Shard(5)])


def test_a_scalar_cannot_be_sharded() -> None:
    with pytest.raises(PlacementError, match="shard dim"):
        make([Shard(0), R], ())


def test_fitting_placements_drop_sizes_that_no_longer_fit() -> None:
    three = init_device_mesh("cpu", 3)
    assert fitting_placements(three, [Shard(0, (5, 2))], (7,)) == (Shard(0),)
    assert fitting_placements(three, [Shard(-1, (5, 1, 1))], (7,)) == (Shard(0, (5, 1, 1)),)
    assert fitting_placements(three, [Shard(0, (5, 1))], (7,), given=[0]) == (Shard(0, (5, 1)),)
    nested = [R, Shard(0, (0, 4, 0, 1, 1, 1))]
    assert fitting_placements(MESH, nested, (7,)) == (R, Shard(0))


def test_contiguous_stride_agrees_with_torch() -> None:
    for shape in ((), (3,), (2, 3, 4), (0, 3), (2, 0, 5), (1, 1)):
        assert contiguous_stride(shape) == torch.empty(shape).stride()


def test_balanced_sizes_are_left_out_of_the_canonical_form() -> None:
    assert make([Shard(0, balanced(7, 2)), R]).placements == (Shard(0), R)


def test_order_of_dims_in_memory() -> None:
    def order(t: torch.Tensor) -> tuple[int, ...]:
        return Spec.make(DeviceMesh("cpu"), [Replicate()], t.shape, t.dtype, t.stride()).order

    assert order(torch.empty(2, 3, 4)) == (0, 1, 2)
    assert order(torch.empty(2, 3, 4).permute(2, 0, 1)) == (1, 2, 0)
    assert order(torch.empty(3, 1).expand(3, 4)) == (0, 1), "an expanded tensor has no order of its own"
