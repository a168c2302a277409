"""``dtorch.nn``: the modules of ``torch.nn``, split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn

import dtorch
from dtorch import DeviceMesh, MeshError, Partial, Replicate, Shard, UsageError, explain, init_device_mesh
from tests.models.zoo import ANY_RULE

pytestmark = ANY_RULE

MESH = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
LINE = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
PLAIN = DeviceMesh("cpu")
LINEARS = {
    "ColumnParallelLinear": (Shard(0), Shard(0), Shard(1)),
    "ColumnParallelLinearWithReplicateOutput": (Shard(0), Shard(0), Replicate()),
    "RowParallelLinear": (Shard(1), Replicate(), Replicate()),
    "RowParallelLinearWithReplicateOutput": (Shard(1), Replicate(), Replicate()),
}
"""Placements of weight, bias and output over the axis."""


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(2)
    return make()


def kinds(report: object) -> Counter[str]:
    return Counter(event.comm.kind for event in report.events)


def on(mesh: DeviceMesh, plain: torch.Tensor, **by_axis: object) -> dtorch.Tensor:
    """A tensor that wants its gradient, on a mesh."""
    return dtorch.Tensor(plain, device_mesh=mesh).redistribute_by_dict(by_axis).requires_grad_()


def assert_gradients_alike(model: nn.Module, expected: nn.Module) -> None:
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        assert a.grad.placements == a.placements
        torch.testing.assert_close(a.grad.to_torch(), b.grad)


@pytest.mark.parametrize("name", LINEARS)
def test_linear(name: str) -> None:
    weight, bias, output = LINEARS[name]
    expected = seeded(lambda: nn.Linear(7, 5))
    model = seeded(lambda: getattr(dtorch.nn, name)(7, 5, device_mesh=MESH))
    assert model.weight.placements == (Replicate(), weight) and model.bias.placements == (Replicate(), bias)
    x = torch.randn(4, 7)
    y = model(dtorch.Tensor(x, device_mesh=MESH, placements=[Shard(0), Replicate()]))
    assert y.placements == (Shard(0), output)
    torch.testing.assert_close(y.detach().to_torch(), expected(x).detach())
    y.square().sum().backward()
    expected(x).square().sum().backward()
    assert_gradients_alike(model, expected)


@pytest.mark.parametrize("lies", [Replicate(), Shard(0), Shard(2), Shard(-1, (1, 0, 2, 7))], ids=str)
@pytest.mark.parametrize("multiple_of", [1, 5])
@pytest.mark.parametrize("name", LINEARS)
def test_an_input_may_lie_in_any_way(name: str, multiple_of: int, lies: object) -> None:
    expected = seeded(lambda: nn.Linear(10, 15))
    model = seeded(lambda: getattr(dtorch.nn, name)(10, 15, device_mesh=LINE, multiple_of=multiple_of))
    plain = torch.randn(3, 2, 10, requires_grad=True)
    x = on(LINE, plain.detach(), tp=lies)
    expected(plain).square().sum().backward()
    model(x).square().sum().backward()
    assert_gradients_alike(model, expected)
    torch.testing.assert_close(x.grad.to_torch(), plain.grad)


@pytest.mark.parametrize("name", LINEARS)
def test_partial_sums_are_added_up_at_the_entrance(name: str) -> None:
    model = seeded(lambda: getattr(dtorch.nn, name)(8, 6, device_mesh=LINE))
    a, b = torch.randn(5, 12), torch.randn(12, 8)
    partial = on(LINE, a, tp=Shard(1)) @ on(LINE, b, tp=Shard(0))
    assert partial.placements == (Partial(),)
    torch.testing.assert_close(model(partial).detach().to_torch(), seeded(lambda: nn.Linear(8, 6))(a @ b).detach())
    with explain() as report:
        model.redistribute_input(partial)
    assert kinds(report) == {"all_reduce" if name.startswith("Column") else "reduce_scatter": 1}


def test_on_one_device_the_bits_are_torchs() -> None:
    x = torch.randn(9, 64)
    for mesh in (PLAIN, init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))):
        for name in LINEARS:
            model = seeded(lambda name=name, mesh=mesh: getattr(dtorch.nn, name)(64, 32, device_mesh=mesh))
            assert torch.equal(model(x).detach().to_torch(), seeded(lambda: nn.Linear(64, 32))(x).detach())


def test_partial_sums_stay_partial_without_a_bias() -> None:
    model = dtorch.nn.RowParallelLinear(64, 32, bias=False, device_mesh=MESH)
    assert model(torch.randn(2, 64)).placements[1] == Partial()
    assert (
        dtorch.nn.RowParallelLinearWithReplicateOutput(64, 32, bias=False, device_mesh=MESH)(torch.randn(2, 64)).placements[1]
        == Replicate()
    )


@pytest.mark.parametrize("mesh", [MESH, LINE], ids=repr)
def test_a_pair_adds_up_once_each_way(mesh: DeviceMesh) -> None:
    with dtorch.use_mesh(mesh):
        pair = [dtorch.nn.ColumnParallelLinear(8, 21), dtorch.nn.RowParallelLinearWithReplicateOutput(21, 8)]
    x = on(mesh, torch.randn(4, 3, 8), dp=Shard(0))
    with explain() as report:
        y = nn.Sequential(pair[0], nn.GELU(), pair[1])(x)
    assert kinds(report) == {"all_reduce": 1}
    with explain() as report:
        y.sum().backward()
        x.grad.redistribute_like(x)
    assert [event.comm.kind for event in report.events if event.comm.axis == "tp"] == ["all_reduce"]


class Entrance(dtorch.nn.ColumnParallelLinear):
    def redistribute_input(self, input: torch.Tensor) -> torch.Tensor:
        self.seen = input.placements
        return super().redistribute_input(input)


class Exit(dtorch.nn.RowParallelLinear):
    def redistribute_output(self, output: torch.Tensor) -> torch.Tensor:
        return output.redistribute_by_dict({self.tp_dim: Shard(1)})


@pytest.mark.parametrize("length", [12, 7, 3])
@pytest.mark.parametrize("mesh", [MESH, LINE], ids=repr)
def test_overridden_for_a_split_sequence(mesh: DeviceMesh, length: int) -> None:
    def model(first: type, last: type, **options: object) -> nn.Module:
        make = lambda: nn.Sequential(first(8, 10, **options), nn.GELU(), last(10, 8, **options))  # noqa: E731
        return seeded(make)

    expected, split = model(nn.Linear, nn.Linear), model(Entrance, Exit, device_mesh=mesh)
    plain = torch.randn(4, length, 8, requires_grad=True)
    x = on(mesh, plain.detach(), dp=Shard(0), tp=Shard(1))
    with explain() as forward:
        y = split(x)
    assert split[0].seen == y.placements == x.placements
    expected(plain).square().sum().backward()
    with explain() as backward:
        y.square().sum().backward()
    for report in (forward, backward):
        of_tp = Counter(event.comm.kind for event in report.events if event.comm.axis == "tp")
        # On the way back the gradient of the last bias is added up, too.
        assert of_tp == {"all_gather": 1, "reduce_scatter": 1, **({"all_reduce": 1} if report is backward else {})}
    assert x.grad.placements == x.placements
    torch.testing.assert_close(x.grad.to_torch(), plain.grad)
    assert_gradients_alike(split, expected)


@pytest.mark.parametrize(("name", "dim"), [("ColumnParallelLinear", 0), ("RowParallelLinear", 1)])
@pytest.mark.parametrize(("mesh", "heads", "sizes"), [(MESH, 8, (12, 12, 8)), (LINE, 9, (12, 8, 8, 8)), (LINE, 2, (4, 4, 0, 0))])
def test_features_of_a_head_stay_together(name: str, dim: int, mesh: DeviceMesh, heads: int, sizes: tuple[int, ...]) -> None:
    layer = getattr(dtorch.nn, name)(heads * 4, heads * 4, device_mesh=mesh, multiple_of=4)
    assert layer.weight.placements[-1] == Shard(dim, sizes)
    assert layer.bias.placements[-1] == (Shard(0, sizes) if dim == 0 else Replicate())
    plain = seeded(lambda: nn.Linear(heads * 4, heads * 4))
    layer.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, heads * 4)
    torch.testing.assert_close(layer(x).detach().to_torch(), plain(x).detach())


@pytest.mark.parametrize("multiple_of", [0, -1, 5])
def test_what_is_no_multiple_is_refused(multiple_of: int) -> None:
    with pytest.raises(UsageError, match=f"multiple_of={multiple_of} for 36 features"):
        dtorch.nn.RowParallelLinear(36, 10, device_mesh=LINE, multiple_of=multiple_of)


def test_embedding() -> None:
    expected = seeded(lambda: nn.Embedding(10, 4, padding_idx=1))
    model = seeded(lambda: dtorch.nn.VocabParallelEmbedding(10, 4, padding_idx=1, device_mesh=MESH))
    ids = torch.tensor([[0, 9, 1], [3, 3, 7]])
    out = model(ids)
    assert model.weight.placements[1] == Shard(0) and out.placements[1] == Replicate()
    assert torch.equal(out.detach().to_torch(), expected(ids).detach())
    out.sum().backward()
    expected(ids).sum().backward()
    assert torch.equal(model.weight.grad.to_torch(), expected.weight.grad)


def test_indices_that_are_split_over_the_axis() -> None:
    model = seeded(lambda: dtorch.nn.VocabParallelEmbedding(10, 4, device_mesh=LINE))
    ids = torch.tensor([[0, 9, 1], [3, 3, 7]])
    out = model(dtorch.Tensor(ids, device_mesh=LINE, placements=[Shard(1)]))
    assert torch.equal(out.detach().to_torch(), seeded(lambda: nn.Embedding(10, 4))(ids).detach())


def test_without_bias_and_on_the_default_mesh() -> None:
    with dtorch.use_mesh(MESH):
        model = dtorch.nn.ColumnParallelLinear(7, 5, bias=False, dtype=torch.float64)
    assert model.bias is None and model.weight.device_mesh is MESH and model.weight.dtype == torch.float64


class Mixed(nn.Module):
    """A module of ``torch.nn`` among those that are split."""

    def __init__(self, column: type[nn.Module], row: type[nn.Module]) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), column(6, 11), nn.ReLU(), row(11, 6))
        self.scale = nn.Parameter(torch.full((6,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale + torch.arange(6)


@pytest.mark.parametrize("mesh", [MESH, LINE, PLAIN], ids=repr)
def test_plain_modules_built_on_the_same_mesh_mix(mesh: DeviceMesh) -> None:
    expected = seeded(lambda: Mixed(nn.Linear, nn.Linear))
    with dtorch.use_mesh(mesh):
        model = seeded(lambda: Mixed(dtorch.nn.ColumnParallelLinear, dtorch.nn.RowParallelLinear))
    assert all(isinstance(p, dtorch.Tensor) and p.device_mesh is mesh for p in model.parameters())
    x = torch.randn(4, 6)
    model.load_state_dict(expected.state_dict())
    out = model(on(mesh, x, dp=Shard(0)))
    torch.testing.assert_close(out.detach().to_torch(), expected(x).detach())
    out.square().sum().backward()
    expected(x).square().sum().backward()
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a.grad.to_torch(), b.grad)


@pytest.mark.parametrize("assign", [False, True])
def test_a_plain_state_dict_splits_by_itself(assign: bool) -> None:
    expected = nn.Linear(6, 8)
    model = dtorch.nn.ColumnParallelLinear(6, 8, device_mesh=MESH, multiple_of=2)
    lies = [(p.device_mesh, p.placements) for p in model.parameters()]
    model.load_state_dict(expected.state_dict(), assign=assign)
    assert [(p.device_mesh, p.placements) for p in model.parameters()] == lies
    assert all(torch.equal(a.to_torch(), b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    x = torch.randn(3, 6)
    model(x).square().sum().backward()
    expected(x).square().sum().backward()
    assert_gradients_alike(model, expected)


@pytest.mark.parametrize("axis", ["tp", "ulysses_cp"])
def test_a_mesh_without_the_axis_makes_them_ordinary(axis: str) -> None:
    for mesh in (PLAIN, init_device_mesh("cpu", 2, mesh_dim_names="dp")):
        model = dtorch.nn.RowParallelLinearWithReplicateOutput(4, 2, device_mesh=mesh, tp_dim=axis, multiple_of=2)
        assert model.weight.placements == (Replicate(),)
        assert model(torch.randn(3, 4)).placements == (Replicate(),)


def test_another_axis_may_be_named() -> None:
    model = dtorch.nn.ColumnParallelLinear(4, 6, device_mesh=MESH, tp_dim="dp")
    assert model.weight.placements == (Shard(0), Replicate())
    own = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    x = dtorch.randn(3, 6, device_mesh=own, placements=[Shard(0), Replicate()])
    assert dtorch.nn.RowParallelLinear(6, 4, device_mesh=own, tp_dim="model", multiple_of=3)(x).placements[0] == Shard(0)


def test_a_misspelt_axis_is_refused() -> None:
    with pytest.raises(UsageError, match=r"(?s)tp_dim='ptp' on DeviceMesh.*use one of \('dp', 'tp'\)") as caught:
        dtorch.nn.VocabParallelEmbedding(4, 6, device_mesh=MESH, tp_dim="ptp")
    assert "dtorch.nn.VocabParallelEmbedding(..., tp_dim=...)" in str(caught.value)
    assert dtorch.nn.ColumnParallelLinear(4, 6, device_mesh=PLAIN, tp_dim="model").weight.placements == (Replicate(),)


def test_what_is_no_mesh_is_refused() -> None:
    with pytest.raises(MeshError, match="device_mesh='cpu'"):
        dtorch.nn.ColumnParallelLinear(4, 6, device_mesh="cpu")


def test_the_rest_is_torchs() -> None:
    assert dtorch.nn.Linear is nn.Linear and dtorch.nn.functional is nn.functional
    namespace: dict[str, object] = {}
    exec("from dtorch.nn import ColumnParallelLinear, Linear", namespace)
    assert namespace["ColumnParallelLinear"] is dtorch.nn.ColumnParallelLinear and namespace["Linear"] is nn.Linear
    with pytest.raises(AttributeError):
        _ = dtorch.nn.NoSuchModule
