"""Every way a tensor can lie, to every other: uneven, nested on one dim, with sizes of its own, and without needless gathers."""

from __future__ import annotations

import itertools

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Partial, Replicate, Shard, init_device_mesh
from tests.sharding.harness import place, same, values
from tests.sharding.placed import assert_holds

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule:RuntimeWarning")
R = Replicate()
GRID = init_device_mesh("cpu", (2, 2))
CHOICES = (R, Shard(0), Shard(1), Partial())
PAIRS = list(itertools.product(itertools.product(CHOICES, CHOICES), repeat=2))


@pytest.mark.parametrize("n", [8, 5, 3, 1, 0])
def test_outer_and_inner_splits_of_one_dim_change_alone(n: int) -> None:
    """Rows come back in their order whichever of two nested splits is changed first."""
    x = torch.arange(2.0 * n).view(n, 2)
    for source, target in PAIRS:
        moved = place(x, GRID, source).redistribute(placements=list(target))
        assert moved.placements == target
        assert_holds(moved, x, (source, target))


@pytest.mark.parametrize("shape", [(5, 10), (6, 256), (2, 14), (1, 3), (7,), ()])
def test_uneven_shards_keep_their_size(shape: tuple) -> None:
    mesh = init_device_mesh("cpu", 4)
    x = values(*shape)
    for placement in [R, Partial(), *[Shard(d) for d in range(len(shape))]]:
        placed = dtorch.Tensor(x, device_mesh=mesh, placements=[placement])
        assert_holds(placed, x, placement)
        back = placed.redistribute(placements=[R])
        assert back.shape == x.shape and all(torch.equal(s, x) for s in back.shards)
        assert torch.equal(placed.view(-1).to_torch(), x.view(-1)) and torch.equal(placed.full_tensor(), x)


def test_cut_points_are_part_of_the_layout() -> None:
    mesh, x, y = init_device_mesh("cpu", 3), values(7, 2), values(7, 2, seed=1)
    cuts = [Shard(0), Shard(0, (1, 1, 5)), Shard(0, (0, 7, 0)), Shard(0, (3, 0, 4))]
    for a, b in itertools.product(cuts, cuts):
        left, right = place(x, mesh, (a,)), place(y, mesh, (b,))
        assert (left._spec is right._spec) == (a == b)
        same((left + right, torch.cat([left, right]), left @ right.t()), (x + y, torch.cat([x, y]), x @ y.t()), f"{a} {b}")
        same(left.redistribute(placements=[b]), x, f"{a} to {b}")


VIEWS = {
    "merged": lambda x: x.view(-1, 6),
    "flat": lambda x: x.view(-1),
    "split": lambda x: x.view(3, 4, 2, 4),
    "linear of a sequence": lambda x: torch.nn.functional.linear(x.view(2, 6, 8), torch.ones(3, 8)),
    "flattened in the middle": lambda x: x.view(2, 6, 4, 2).flatten(1, 2),
    "flattened before a split": lambda x: x.view(3, 4, 8).flatten(0, 1),
    "transposed and merged": lambda x: x.t().reshape(6, 16),
    "heads": lambda x: x.view(12, 2, 4).transpose(0, 1).reshape(2, 48),
}


@pytest.mark.parametrize("mesh_shape", [(4,), (5,), (2, 2), (2, 3)])
@pytest.mark.parametrize("name", VIEWS)
def test_views_of_split_dims_have_ordinary_placements(name: str, mesh_shape: tuple) -> None:
    mesh, x = init_device_mesh("cpu", mesh_shape), values(12, 8)
    for placements in itertools.product((R, Shard(0), Shard(1)), repeat=len(mesh_shape)):
        out = VIEWS[name](place(x, mesh, placements))
        assert all(type(p) in (Replicate, Shard, Partial) for p in out.placements)
        same(out, VIEWS[name](x), f"{name} {placements}")


def test_no_collective_beyond_what_a_change_needs() -> None:
    x = values(8, 8, 8)
    rows = {
        ((Shard(1), Shard(1)), (Shard(1), Shard(2))): ["all_to_all"],
        ((Shard(0), R), (Shard(0), Shard(1))): [],
        ((R, Shard(0)), (R, Shard(2))): ["all_to_all"],
        ((Partial(), R), (Shard(0), R)): ["reduce_scatter"],
        ((Partial(), Shard(0)), (R, Shard(0))): ["all_reduce"],
        ((R, R), (Shard(0), Shard(0))): [],
    }
    for (source, target), kinds in rows.items():
        placed = place(x, GRID, source)
        with dtorch.explain() as report:
            moved = placed.redistribute(placements=list(target))
        assert [event.comm.kind for event in report.events] == kinds, (source, target, str(report))
        same(moved, x, f"{source} {target}")


def test_what_stays_split_is_not_gathered() -> None:
    """Slices, sorts along other dims, joins and scans of a split tensor move less than gathering would."""
    mesh, x = init_device_mesh("cpu", 4), values(64, 16, distinct=True)
    programs = {
        "slice": lambda z: z[16:48],
        "part over a cut": lambda z: z[10:30],
        "sort of columns": lambda z: z.sort(1).values,
        "topk": lambda z: z.topk(3, 0).values,
        "join": lambda z: torch.cat([z, z], 1),
        "flip": lambda z: z.flip(1),
        "scan": lambda z: z.cumsum(0),
        "roll": lambda z: z.roll(1, 0),
        "select": lambda z: z[7],
        "maximum": lambda z: z.amax(0),
    }
    for name, fn in programs.items():
        with dtorch.explain() as report:
            out = fn(place(x, mesh, (Shard(0),)))
        assert report.nbytes < 3 * x.nbytes and not report.replicated, f"{name}: {report}"
        same(out, fn(x), name)


def test_a_mesh_of_other_devices_or_of_other_shape() -> None:
    far, cube = DeviceMesh("cpu", [9, 4, 7]), init_device_mesh("cpu", (2, 1, 3))
    x = values(7, 5)
    for mesh, placements in ((far, [Shard(0)]), (cube, [Shard(1), R, Shard(0)]), (far, [R]), (init_device_mesh("cpu", 1), [R])):
        for source in ((Shard(0), Shard(1)), (Shard(0), Shard(0)), (Partial(), Shard(1)), (R, R)):
            moved = place(x, GRID, source).redistribute(mesh, placements)
            assert moved.device_mesh is mesh
            same(moved, x, f"{source} to {placements}")
    kept = place(x, GRID, (Shard(0), Shard(1))).redistribute(init_device_mesh("cpu", (2, 3)))
    assert kept.placements == (Shard(0), Shard(1))
    same(kept, x, "placements kept")


@pytest.mark.parametrize("ways", [2, 3, 5])
def test_attention_over_split_positions_masks_by_global_positions(ways: int) -> None:
    """Rows of queries on later devices may look at all earlier keys, and no load is misplaced."""
    mesh = init_device_mesh("cpu", ways)
    q, k, v = (values(2, 2, 7, 4, seed=s) for s in range(3))
    for one, other in itertools.product((Shard(2), Shard(1), R), repeat=2):
        got = torch.nn.functional.scaled_dot_product_attention(
            place(q, mesh, (one,)), place(k, mesh, (other,)), place(v, mesh, (other,)), is_causal=True
        )
        same(got, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), f"{one} {other}")


def test_functions_on_uneven_local_tensors() -> None:
    mesh, x = init_device_mesh("cpu", 3), values(7, 4)
    for placement in (Shard(0), Shard(0, (0, 2, 5)), Shard(1)):
        double = dtorch.local_map(lambda t: t * 2 + t.shape[0] * 0, [[placement]], [placement], mesh)
        same(double(place(x, mesh, (placement,))), x * 2, str(placement))
