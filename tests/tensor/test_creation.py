"""Making tensors: factories, conversion from data, local pieces, the default mesh, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Partial, PlacementError, Replicate, Shard, UsageError, init_device_mesh, use_mesh
from tests.sharding.placed import assert_holds, every_placement

R = Replicate()
MESH = init_device_mesh("cpu", (2, 2))
PLACEMENTS = [
    [R, R],
    [Shard(0), R],
    [Shard(1), Shard(0)],
    [Shard(0), Shard(0)],
    [R, Shard(1, (3, 1))],
    [Partial(), R],
    [Partial("max"), Shard(0)],
]

FACTORIES = {
    "zeros": lambda m, **k: m.zeros(5, 4, **k),
    "zeros of a list": lambda m, **k: m.zeros([5, 4], dtype=torch.int64, **k),
    "ones": lambda m, **k: m.ones((5, 4), dtype=torch.bfloat16, **k),
    "full": lambda m, **k: m.full((5, 4), 3, **k),
    "full of bool": lambda m, **k: m.full((5, 4), True, **k),
    "rand": lambda m, **k: m.rand(5, 4, **k),
    "randn": lambda m, **k: m.randn(5, 4, dtype=torch.float64, **k),
    "randint": lambda m, **k: m.randint(9, (5, 4), **k),
    "randint from low": lambda m, **k: m.randint(-3, 9, (5, 4), dtype=torch.int32, **k),
    "eye": lambda m, **k: m.eye(5, 4, **k),
    "square eye": lambda m, **k: m.eye(4, **k),
}
LINES = {
    "arange": lambda m, **k: m.arange(7, **k),
    "arange with a start": lambda m, **k: m.arange(2, 7, **k),
    "arange with a step": lambda m, **k: m.arange(1, 2, 0.25, **k),
    "linspace": lambda m, **k: m.linspace(0, 1, 7, **k),
}


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
@pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES)
def test_factories_agree_with_torch(make: object, placements: list) -> None:
    torch.manual_seed(3)
    expected = make(torch)
    if expected.shape == (4, 4):
        placements = [Shard(p.dim) if isinstance(p, Shard) else p for p in placements]
    torch.manual_seed(3)
    made = make(dtorch, device_mesh=MESH, placements=placements)
    ops = {p.reduce_op for p in placements if isinstance(p, Partial)}
    if expected.dtype == torch.bool and ops - {"max"}:
        assert torch.equal(made.to_torch(), expected)
    else:
        assert_holds(made, expected)
    assert made.stride() == expected.stride() and not made.requires_grad


@pytest.mark.parametrize("make", LINES.values(), ids=LINES)
def test_one_dimensional_factories(make: object) -> None:
    mesh = init_device_mesh("cpu", 3)
    for placements in every_placement(mesh, make(torch).shape):
        assert_holds(make(dtorch, device_mesh=mesh, placements=placements), make(torch))


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)], ids=str)
def test_scalars_and_nothing(shape: tuple[int, ...]) -> None:
    for placements in every_placement(MESH, shape, ("sum",)):
        assert_holds(dtorch.full(shape, 2.5, device_mesh=MESH, placements=placements), torch.full(shape, 2.5))
        assert dtorch.empty(shape, device_mesh=MESH, placements=placements).shape == shape


def test_like_forms_follow_the_template() -> None:
    template = dtorch.Tensor(torch.arange(20).view(5, 4), device_mesh=MESH, placements=[Shard(0, (4, 1)), Shard(1)])
    for like, expected in [
        (dtorch.zeros_like(template), torch.zeros(5, 4, dtype=torch.int64)),
        (dtorch.ones_like(template), torch.ones(5, 4, dtype=torch.int64)),
        (dtorch.full_like(template, 7), torch.full((5, 4), 7)),
    ]:
        assert_holds(like, expected)
        assert like.placements == template.placements and like.device_mesh is MESH
    assert dtorch.empty_like(template).dtype == torch.int64
    assert dtorch.zeros_like(template, dtype=torch.float16, placements=[R, R]).placements == (R, R)
    floats = template.double()
    torch.manual_seed(1)
    plain = torch.randn(5, 4, dtype=torch.float64), torch.rand(5, 4, dtype=torch.float64)
    torch.manual_seed(1)
    assert_holds(dtorch.randn_like(floats), plain[0])
    assert_holds(dtorch.rand_like(floats), plain[1])
    assert dtorch.ones_like(dtorch.zeros((), device_mesh=MESH)).to_torch().tolist() == 1.0


def test_like_of_a_partial_is_replicated() -> None:
    partial = dtorch.ones(3, device_mesh=MESH, placements=[Partial(), Shard(0)])
    assert dtorch.zeros_like(partial).placements == (R, Shard(0))


def test_torch_like_forms_work_on_global_tensors() -> None:
    x = dtorch.ones(5, 4, device_mesh=MESH, placements=[Shard(0), Shard(1)])
    for made, expected in [
        (torch.zeros_like(x), 0.0),
        (torch.ones_like(x), 1.0),
        (torch.full_like(x, 2.0), 2.0),
        (x.new_zeros(3), 0.0),
        (x.new_full((2, 2), 5.0), 5.0),
    ]:
        assert isinstance(made, dtorch.Tensor) and made.device_mesh is MESH
        assert made.to_torch().eq(expected).all()
    assert x.new_tensor([1.0, 2.0]).tolist() == [1.0, 2.0]


def test_requires_grad_and_dtype_defaults() -> None:
    assert dtorch.zeros(2, requires_grad=True).requires_grad
    assert (
        dtorch.zeros(2).dtype == torch.float32
        and dtorch.arange(3).dtype == torch.int64
        and dtorch.arange(3.0).dtype == torch.float32
    )
    torch.set_default_dtype(torch.float64)
    try:
        assert dtorch.zeros(2).dtype == dtorch.linspace(0, 1, 3).dtype == dtorch.full((1,), 1.0).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "data", [[[1.0, 2.0], [3.0, 4.0]], ((1, 2), (3, 4)), 5, 2.5, True, np.arange(6.0).reshape(2, 3), []], ids=str
)
def test_from_data(data: object) -> None:
    expected = torch.tensor(data)
    assert_holds(dtorch.Tensor(data, device_mesh=MESH), expected)
    assert_holds(dtorch.tensor(data), expected)
    assert dtorch.tensor(data).device_mesh is DeviceMesh("cpu")
    assert_holds(dtorch.tensor(data, dtype=torch.float64), torch.tensor(data, dtype=torch.float64))


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_from_a_plain_tensor_and_back(placements: list) -> None:
    x = torch.randn(5, 4)
    assert_holds(dtorch.Tensor(x, device_mesh=MESH, placements=placements), x)
    assert torch.equal(dtorch.Tensor(x.t(), device_mesh=MESH, placements=[R, R]).to_torch(), x.t())


def test_the_source_is_copied_and_left_alone() -> None:
    x = torch.ones(4, requires_grad=True)
    for placements in ([R, R], [Shard(0), R]):
        made = dtorch.Tensor(x, device_mesh=MESH, placements=placements)
        assert not made.requires_grad and made.is_leaf
        with torch.no_grad():
            x.mul_(2)
        assert made.tolist() == [1.0] * 4
        made.zero_()
        with torch.no_grad():
            x.fill_(1)
        made.to_torch().fill_(7)
        assert made.tolist() == [0.0] * 4


def test_from_a_global_tensor() -> None:
    x = dtorch.ones(4, device_mesh=MESH, placements=[Shard(0), R])
    same, moved = dtorch.Tensor(x), dtorch.Tensor(x, device_mesh=DeviceMesh("cpu", [5, 6]), placements=[R])
    x.zero_()
    assert same.placements == x.placements and same.tolist() == moved.tolist() == [1.0] * 4
    assert moved.device_mesh is DeviceMesh("cpu", [5, 6])
    assert dtorch.Tensor(x, requires_grad=True).requires_grad and not x.requires_grad
    assert dtorch.DTensor is dtorch.Tensor


@pytest.mark.parametrize(
    "data", ["text", {"a": 1}, [[1, 2], [3]], [object()], None], ids=["text", "dict", "ragged", "object", "none"]
)
def test_data_that_is_no_tensor(data: object) -> None:
    with pytest.raises(UsageError, match="to do"):
        dtorch.Tensor(data)


def test_from_local_of_a_list_and_of_a_function() -> None:
    pieces = [torch.full((2, n), float(i)) for i, n in enumerate((1, 3, 0))]
    mesh = init_device_mesh("cpu", 3)
    for made in (dtorch.from_local(pieces, mesh, [Shard(1)]), dtorch.from_local(lambda c: pieces[c[0]], mesh, [Shard(-1)])):
        assert made.placements == (Shard(1, (1, 3, 0)),) and made.shape == (2, 4)
        assert made.to_torch().tolist() == [[0.0, 1.0, 1.0, 1.0]] * 2
        assert [t.shape for t in made.shards] == [(2, 1), (2, 3), (2, 0)]
    pieces[0].fill_(9)
    assert made.to_torch()[0, 0] == 0


def test_from_local_nested_on_one_dim() -> None:
    sizes = {(0, 0): 0, (0, 1): 3, (1, 0): 1, (1, 1): 1}
    made = dtorch.from_local(lambda c: torch.full((sizes[c],), float(c[0] * 2 + c[1])), MESH, [Shard(0), Shard(0)])
    assert made.placements == (Shard(0), Shard(0, (0, 3, 1, 1))) or made.placements == (Shard(0, (3, 2)), Shard(0, (0, 3, 1, 1)))
    assert made.tolist() == [1.0, 1.0, 1.0, 2.0, 3.0]
    assert [made.local_shape(c) for c in sizes] == [(0,), (3,), (1,), (1,)]


def test_from_local_partial_and_replicated() -> None:
    made = dtorch.from_local(lambda c: torch.tensor([float(c[0]), c[1] * 10.0]), MESH, [Partial(), Partial("max")])
    assert made.tolist() == [1.0, 20.0]
    first = dtorch.from_local(lambda c: torch.tensor([float(c[0])]), MESH, [Shard(0), R])
    assert first.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("local", "placements", "error", "rule"),
    [
        ([torch.ones(2)], [Shard(0), R], UsageError, "one local torch.Tensor per device"),
        (lambda c: [1.0], [Shard(0), R], UsageError, "one local torch.Tensor per device"),
        ([torch.ones(2)] * 4, [Shard(0)], PlacementError, "one placement per mesh axis"),
        ([torch.ones(2)] * 4, [Shard(1), R], PlacementError, "shard dim"),
        (lambda c: torch.ones(2 + c[1]), [Shard(0), R], PlacementError, "make it"),
        (lambda c: torch.ones(2, dtype=(torch.float32, torch.float64)[c[0]]), [Shard(0), R], PlacementError, "make it"),
        (lambda c: torch.ones(2, 2 + c[0]), [Shard(0), R], PlacementError, "make it"),
    ],
)
def test_from_local_refusals(local: object, placements: list, error: type, rule: str) -> None:
    with pytest.raises(error, match=rule):
        dtorch.from_local(local, MESH, placements)


def test_the_default_mesh_is_one_device_unless_set() -> None:
    assert dtorch.zeros(2).device_mesh is DeviceMesh("cpu")
    with use_mesh(MESH) as mesh:
        assert mesh is MESH
        assert dtorch.zeros(2).device_mesh is MESH
        with use_mesh(DeviceMesh("cpu", [3])):
            assert dtorch.Tensor([1.0]).device_mesh.ids == (3,)
        assert dtorch.Tensor([1.0]).device_mesh is MESH
    assert dtorch.zeros(2).device_mesh is DeviceMesh("cpu")


TORCH_FACTORIES = [
    lambda: torch.zeros(2, 3),
    lambda: torch.zeros((2, 3), dtype=torch.int64, device="cpu"),
    lambda: torch.ones(size=(2, 3)),
    lambda: torch.full((2,), 1.5),
    lambda: torch.arange(5),
    lambda: torch.arange(1, 5, dtype=torch.float32),
    lambda: torch.arange(end=4),
    lambda: torch.arange(start=1, end=4, step=2),
    lambda: torch.linspace(0, 1, 5),
    lambda: torch.linspace(0, 1, steps=5),
    lambda: torch.eye(3),
    lambda: torch.tensor([1, 2]),
    lambda: torch.tensor(3.5),
    lambda: torch.scalar_tensor(2.0),
    lambda: torch.randperm(5),
    lambda: torch.rand(2),
    lambda: torch.randn((2, 3)),
    lambda: torch.randint(5, (3,)),
    lambda: torch.randint(0, 5, size=(3,)),
    lambda: torch.logspace(0, 2, 3),
    lambda: torch.tril_indices(3, 3),
    lambda: torch.full(size=(2,), fill_value=4),
    lambda: torch.normal(0.0, 1.0, (3,)),
]


@pytest.mark.parametrize("make", TORCH_FACTORIES, ids=range(len(TORCH_FACTORIES)))
def test_torch_factories_inside_use_mesh(make: object) -> None:
    torch.manual_seed(0)
    expected = make()
    with use_mesh(MESH):
        torch.manual_seed(0)
        made = make() * 1
    x = dtorch.ones((), device_mesh=MESH) * made
    assert torch.equal(x.to_torch().to(expected.dtype), expected)
    assert made.dtype == expected.dtype


@pytest.mark.parametrize("make", TORCH_FACTORIES[:11], ids=range(11))
def test_common_torch_factories_make_global_tensors_inside_use_mesh(make: object) -> None:
    with use_mesh(MESH):
        assert isinstance(made := make(), dtorch.Tensor) and made.device_mesh is MESH


def test_a_shape_that_does_not_fit_is_refused_at_once() -> None:
    with pytest.raises(RuntimeError):
        dtorch.zeros(-1)
    with pytest.raises(PlacementError, match="shard dim"):
        dtorch.zeros(3, device_mesh=MESH, placements=[Shard(1), R])
    with pytest.raises(PlacementError, match="one placement"):
        dtorch.zeros(3, device_mesh=MESH, placements=[R])
    with pytest.raises(PlacementError, match="one placement"):
        dtorch.Tensor(torch.ones(3), device_mesh=MESH, placements=[])
