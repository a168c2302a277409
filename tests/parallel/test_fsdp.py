"""Weights split between their uses: what is gathered and sent, what is held, and that nobody else notices."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dtorch
from benchmarks.meter import metered
from dtorch import DeviceMesh, PlacementError, Replicate, Shard, UsageError, communication, explain, init_device_mesh
from dtorch.parallel.axes import BATCH_AXES, dividing
from dtorch.parallel.fsdp import GATHER

R = Replicate()
MESH = init_device_mesh("cpu", 2, mesh_dim_names=("fsdp",))
MESHES = {
    "fsdp=2": MESH,
    "fsdp=3": init_device_mesh("cpu", 3, mesh_dim_names=("fsdp",)),
    "dp=2,fsdp=2": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp")),
    "fsdp=2,tp=3": init_device_mesh("cpu", (2, 3), mesh_dim_names=("fsdp", "tp")),
}
PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


class Layer(nn.Module):
    """A residual layer with a norm and two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 13), nn.Linear(13, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Layers between an entrance and an exit."""

    def __init__(self, layers: int = 2, recompute: bool | None = None) -> None:
        super().__init__()
        self.enter, self.layers, self.exit = nn.Linear(5, 8), nn.ModuleList(Layer() for _ in range(layers)), nn.Linear(8, 3)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x) if self.recompute is None else checkpoint(layer, x, use_reentrant=self.recompute)
        return self.exit(x)


def inputs(rows: int = 7) -> torch.Tensor:
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(1))


def pair(model: nn.Module | None = None, mesh: DeviceMesh = MESH, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A plain model and its distributed copy."""
    plain = model or Model()
    plan = PLAN if "tp" in mesh.axis_names() and isinstance(plain, Model) else None
    return plain, dtorch.parallelize(copy.deepcopy(plain), mesh, plan, **options)


def loss_of(model: nn.Module, x: torch.Tensor | None = None) -> torch.Tensor:
    return (model(inputs() if x is None else x) ** 2).mean()


def check_gradients(ours: nn.Module, plain: nn.Module) -> None:
    for (name, a), b in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if b.grad is not None:
            torch.testing.assert_close(a.grad.to_torch(), b.grad, msg=lambda text, name=name: f"{name}: {text}")


def counts(report: dtorch.tensor.watch.Report, axis: str = "fsdp") -> dict[str, int]:
    """Collectives of blocks, by kind."""
    kinds = [e.comm.kind for e in report.events if e.comm.axis == axis and e.comm.operator.startswith("fsdp ")]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("mesh", MESHES)
def test_three_steps_are_those_of_one_device(mesh: str, zero: int) -> None:
    plain, ours = pair(mesh=MESHES[mesh], zero=zero)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, ours)]
    for _ in range(3):
        for model in (plain, ours):
            loss_of(model).backward()
            loss_of(model, inputs(5)).backward()
        check_gradients(ours, plain)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (plain, ours)]
        torch.testing.assert_close(norms[1].to_torch(), norms[0])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.to_torch(), b)


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_optimizers_work_on_shards(kind: type, options: dict[str, bool]) -> None:
    plain, ours = pair()
    momentum = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizers = [kind(m.parameters(), lr=1e-2, **momentum, **options) for m in (plain, ours)]
    for _ in range(2):
        for model, optimizer in zip((plain, ours), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.to_torch(), b)
        for state in optimizers[1].state[a].values():
            assert getattr(state, "ndim", 0) == 0 or state.placements == a.placements


def test_weights_gradients_and_optimizer_state_are_split() -> None:
    for zero, split in ((3, True), (2, True), (1, False)):
        _, ours = pair(zero=zero)
        loss_of(ours).backward()
        weight = ours.layers[0].up.weight
        assert weight.placements == (Shard(0),) and weight.is_leaf
        assert weight.grad.placements == ((Shard(0),) if split else (R,))


def test_the_longest_dim_that_no_other_axis_splits_is_split() -> None:
    _, ours = pair(mesh=MESHES["fsdp=2,tp=3"])
    layer = ours.layers[0]
    assert layer.up.weight.placements == (Shard(1), Shard(0))
    assert layer.down.weight.placements == (Shard(0), Shard(1))
    assert layer.up.bias.placements == (R, Shard(0)), "split by tp, and one dim has no other"
    assert layer.norm.weight.placements == (Shard(0), R)
    text = str(dtorch.describe(ours))
    assert (
        "are whole on fsdp" in text and "zero=3: weights over fsdp are gathered" in text and "fsdp Shard(1), tp Shard(0)" in text
    )


def test_buffers_and_short_parameters_are_whole() -> None:
    _, ours = pair(nn.Sequential(nn.BatchNorm1d(5), nn.PReLU()))
    assert ours[0].running_mean.placements == ours[1].weight.placements == (R,)


def test_a_plan_may_place_over_fsdp() -> None:
    plan = {"0.weight": {"fsdp": Shard(1)}, "2": [R]}
    ours = dtorch.parallelize(nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 4)), MESH, plan)
    assert (ours[0].weight.placements, ours[0].bias.placements, ours[2].weight.placements) == ((Shard(1),), (Shard(0),), (R,))
    mesh = MESHES["fsdp=2,tp=3"]
    with pytest.raises(PlacementError, match=r"(?s)placements .* of 0.weight.*no other axis splits"):
        dtorch.parallelize(nn.Sequential(nn.Linear(4, 9)), mesh, {"0.weight": {"fsdp": Shard(0), "tp": Shard(0)}})


@pytest.mark.parametrize("zero", [0, 4, "3", None])
def test_other_levels_are_refused(zero: Any) -> None:
    with pytest.raises(UsageError, match=r"(?s)zero=.*where: parallelize"):
        dtorch.parallelize(nn.Linear(2, 2), MESH, zero=zero)


def test_the_batch_is_split_over_both_axes_as_far_as_it_goes() -> None:
    mesh = MESHES["dp=2,fsdp=2"]
    assert [dividing(mesh, BATCH_AXES, n) for n in (1, 2, 3, 4)] == [[], ["dp"], ["dp"], ["dp", "fsdp"]]
    assert pair(mesh=mesh)[1](inputs(4)).placements == (Shard(0), Shard(0))
    assert dividing(DeviceMesh("cpu"), BATCH_AXES, 4) == []


def test_one_collective_a_block() -> None:
    _, ours = pair(Model(layers=3))
    with explain() as report:
        loss = loss_of(ours)
    assert counts(report) == {"all_gather": 4}
    with explain() as report:
        loss.backward()
    assert counts(report) == {"all_gather": 4, "reduce_scatter": 4}
    assert {e.comm.nbytes for e in report.events if "layer" not in e.comm.operator} >= {nbytes(ours.layers[0])}


def test_dp_and_tp_gradients_go_together_too() -> None:
    for name, axis in (("dp=2,fsdp=2", "dp"), ("fsdp=2,tp=3", "fsdp")):
        _, ours = pair(mesh=MESHES[name])
        loss = loss_of(ours, inputs(8))
        with explain() as report:
            loss.backward()
        assert counts(report, axis)["all_reduce"] == (3 if axis == "dp" else 2)
        assert counts(report)["reduce_scatter"] == 3


def test_nothing_else_is_sent_forward() -> None:
    _, ours = pair()
    with explain() as report, communication("forbid"):
        ours(inputs())
    assert len(report.events) == 3


@pytest.mark.parametrize("zero", [1, 2])
def test_below_three_weights_are_gathered_when_they_have_changed(zero: int) -> None:
    plain, ours = pair(zero=zero)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, ours)]
    with explain() as report:
        loss_of(ours)
        loss_of(ours).backward()
        with torch.no_grad():
            ours(inputs())
    assert counts(report) == {"all_gather": 3, ("all_reduce" if zero == 1 else "reduce_scatter"): 3}
    loss_of(plain).backward()
    for optimizer in optimizers:
        optimizer.step()
    with explain() as report:
        torch.testing.assert_close(ours(inputs()).to_torch(), plain(inputs()))
    assert counts(report) == {"all_gather": 3}
    with torch.no_grad():
        ours.exit.bias.data.mul_(2)
        plain.exit.bias.data.mul_(2)
    torch.testing.assert_close(ours(inputs()).to_torch(), plain(inputs()))


def nbytes(module: nn.Module) -> int:
    return 4 * sum(p.numel() for p in module.parameters() if max(p.shape) > 1)


def test_one_block_at_a_time_is_whole() -> None:
    plain = Model(layers=4)
    layer, outside = nbytes(plain.layers[0]), nbytes(plain.enter) + nbytes(plain.exit)
    with metered(GATHER) as (client, meter):
        _, ours = pair(plain)
        with torch.no_grad():
            ours(inputs()).to_torch()
        assert (meter.marked, meter.most_marked) == (0, layer + outside)
        loss = loss_of(ours)
        loss.to_torch()
        assert (meter.marked, meter.most_marked) == (0, layer + outside)
        loss.backward()
        del loss
        gc.collect()
        client.flush()
        client.flush()
        assert (meter.marked, meter.most_marked) == (0, layer + outside)
        split = sum(max(s.numel() for s in p.shards) for p in ours.parameters())
        assert meter.now == 4 * 2 * split, "shards of weights and gradients, nothing else"


def test_whole_weights_stand_in_forward_only() -> None:
    seen: list[Any] = []

    class Spy(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((self.up.weight.placements, isinstance(self.up.weight, nn.Parameter), self.up.weight.requires_grad))
            return super().forward(x)

    model = Model()
    model.layers[1] = Spy()
    _, ours = pair(model)
    before = dict(ours.named_parameters())
    ours(inputs())
    assert seen == [((R,), True, True)]
    after = dict(ours.named_parameters())
    assert all(after[name] is p for name, p in before.items()) and len(after) == len(before)


def test_a_pass_that_fails_leaves_the_parameters() -> None:
    class Failing(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x)
            raise ValueError("stop")

    model = Model()
    model.layers[1] = Failing()
    _, ours = pair(model)
    before = dict(ours.named_parameters())
    with pytest.raises(ValueError, match="stop"):
        ours(inputs())
    assert all(before[name] is p for name, p in ours.named_parameters())
    model.layers[1].__class__ = ours.layers[1].__class__ = Layer
    loss_of(ours).backward()
    loss_of(model).backward()
    check_gradients(ours, model)


def test_a_pass_that_was_interrupted_is_made_good_at_the_next() -> None:
    class Interrupted(Layer):
        stop = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.stop:
                raise KeyboardInterrupt
            return super().forward(x)

    model = Model()
    model.layers[1] = Interrupted()
    plain, ours = pair(model)
    before = dict(ours.named_parameters())
    with pytest.raises(KeyboardInterrupt):
        ours(inputs())
    Interrupted.stop = False
    with torch.no_grad():
        for p in (*before.values(), *plain.parameters()):
            p.mul_(2)
    torch.testing.assert_close(ours(inputs()).to_torch(), plain(inputs()))
    assert all(before[name] is p for name, p in ours.named_parameters())


class Tied(Model):
    """One weight in two layers and outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].up.weight = self.layers[0].up.weight
        self.outer = nn.Linear(8, 13, bias=False)
        self.outer.weight = self.layers[0].up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        return self.exit(self.layers[1](self.layers[0](x))) + self.outer(x).sum()


class Twice(Model):
    """A layer that runs twice, and within itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        return self.exit(self.layers[0](self.layers[1](self.layers[0](x))))


class Recursive(Model):
    """The model calls itself."""

    def forward(self, x: torch.Tensor, deep: bool = True) -> torch.Tensor:
        return super().forward(x) + (self(x, deep=False) if deep else 0)


class Direct(Model):
    """Weights of layers used outside of them, and a layer's part called alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        x = nn.functional.linear(x, self.layers[0].up.weight) @ self.layers[1].up.weight
        return self.exit(self.layers[1].norm(x))


class Views(nn.Module):
    """A weight in pieces, transposed, and handed out of its module."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(15, 5) / 4)

        def forward(self, rows: int) -> torch.Tensor:
            return self.weight[:rows].t()

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.Table(), nn.MultiheadAttention(5, 1, batch_first=True)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = self.layers[0](15).chunk(3, 1)
        x = (x @ a) * (x @ b) + x @ c
        return self.layers[1](x[None], x[None], x[None])[0][0] @ self.layers[0](4)


class Crossed(nn.Module):
    """Weights of two layers that meet in one operator, out of both."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Views.Table(), Views.Table()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.layers[0](10), self.layers[1](10)
        return (a * b).sum() + (x @ a @ b.t()).mean() * (b - a).pow(2).mean()


class Penalized(Model):
    """A gradient taken within forward, and differentiated."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.enter(x)
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self.layers[0](h).sum(), h, create_graph=True)
        return super().forward(x) + slope.pow(2).mean()


@pytest.mark.parametrize("mesh", ["fsdp=2", "fsdp=3", "dp=2,fsdp=2"])
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("kind", [Tied, Twice, Recursive, Direct, Views, Crossed, Penalized])
@pytest.mark.filterwarnings("ignore:.*has no sharding rule:RuntimeWarning")
def test_other_ways_to_use_weights(kind: type, zero: int, mesh: str) -> None:
    plain, ours = pair(kind(), MESHES[mesh], zero=zero)
    for model in (plain, ours):
        for _ in range(2):
            loss_of(model).backward()
    torch.testing.assert_close(ours(inputs()).to_torch(), plain(inputs()))
    check_gradients(ours, plain)
    if kind is Tied:
        assert ours.outer.weight is ours.layers[0].up.weight is ours.layers[1].up.weight


@pytest.mark.parametrize("frozen", [("layers.0",), ("enter", "exit"), ("layers.0.up", "layers.1.up.weight", "layers.1.norm")])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_frozen_parameters(frozen: tuple[str, ...], zero: int) -> None:
    plain, ours = pair(zero=zero)
    for model in (plain, ours):
        for name, p in model.named_parameters():
            p.requires_grad_(not name.startswith(frozen))
    loss_of(plain).backward()
    loss = loss_of(ours)
    with explain() as report:
        loss.backward()
    check_gradients(ours, plain)
    assert counts(report).get("all_gather", 0) == (3 if zero == 3 else 0), "frozen weights come back once too"
    ours.requires_grad_(False)
    x = inputs().requires_grad_()
    loss_of(ours, x).backward()
    expected = inputs().requires_grad_()
    loss_of(plain.requires_grad_(False), expected).backward()
    torch.testing.assert_close(x.grad.to_torch() if isinstance(x.grad, dtorch.Tensor) else x.grad, expected.grad)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints(reentrant: bool) -> None:
    plain, ours = pair(Model(recompute=reentrant))
    loss_of(plain).backward()
    loss = loss_of(ours)
    with explain() as report:
        loss.backward()
    check_gradients(ours, plain)
    assert counts(report) == {"all_gather": 3, "reduce_scatter": 3}, "what recomputes has gathered for the backward pass"
    with metered(GATHER) as (client, meter):
        plain, ours = pair(Model(layers=4, recompute=reentrant))
        loss_of(ours).backward()
        client.flush()
        most = nbytes(plain.layers[0]) + nbytes(plain.enter) + nbytes(plain.exit)
        assert (meter.marked, meter.most_marked) == (0, most)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_inference(guard: Any) -> None:
    plain, ours = pair()
    with guard():
        torch.testing.assert_close(ours(inputs()).to_torch(), plain(inputs()))
        assert not ours(inputs()).requires_grad
    loss_of(ours).backward()
    loss_of(plain).backward()
    check_gradients(ours, plain)


def test_a_copy_is_a_model_of_its_own() -> None:
    plain, ours = pair()
    loss_of(ours).backward()
    copied = copy.deepcopy(ours)
    copied.zero_grad()
    with torch.no_grad():
        copied.exit.weight.zero_()
    with explain() as report:
        loss_of(copied).backward()
    assert counts(report) == {"all_gather": 6, "reduce_scatter": 3}
    loss_of(plain).backward()
    check_gradients(ours, plain)
    with torch.no_grad():
        plain.exit.weight.zero_()
    plain.zero_grad()
    loss_of(plain).backward()
    check_gradients(copied, plain)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_weights_that_are_computed_or_converted(zero: int) -> None:
    model = Model()
    nn.utils.parametrizations.weight_norm(model.layers[0].up)
    nn.utils.parametrizations.spectral_norm(model.layers[1].down)
    plain, ours = pair(model, zero=zero)
    for dtype in (torch.float32, torch.float64):
        for m in (plain, ours):
            m.to(dtype)
            m.zero_grad()
            loss_of(m, inputs().to(dtype)).backward()
        check_gradients(ours, plain)


def test_a_backward_hook_may_run_the_model() -> None:
    plain, ours = pair()
    for m in (plain, ours):
        y = m(inputs())
        y.register_hook(lambda _, m=m: _run(m))
        (y**2).mean().backward()
    check_gradients(ours, plain)


def _run(model: nn.Module) -> None:
    with torch.no_grad():
        model(inputs())


def test_averaged_and_functional_models() -> None:
    plain, ours = pair()
    averages = [torch.optim.swa_utils.AveragedModel(m) for m in (plain, ours)]
    for average, m in zip(averages, (plain, ours), strict=True):
        average.update_parameters(m)
        with torch.no_grad():
            m.exit.weight.mul_(3)
        average.update_parameters(m)
    torch.testing.assert_close(averages[1](inputs()).to_torch(), averages[0](inputs()))
    weights = {name: p.detach() * 2 for name, p in plain.named_parameters()}
    given = {name: dtorch.Tensor(t, device_mesh=MESH) for name, t in weights.items()}
    made = torch.func.functional_call(ours, given, (inputs(),))
    torch.testing.assert_close(made.to_torch(), torch.func.functional_call(plain, weights, (inputs(),)))
    torch.testing.assert_close(ours(inputs()).to_torch(), plain(inputs()))


def test_an_axis_of_one_device_and_a_batch_of_one() -> None:
    plain, ours = pair(mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("fsdp", "tp")))
    with explain() as report:
        loss_of(ours).backward()
    assert counts(report) == {} and ours.enter.weight.placements == (R, R)
    loss_of(plain).backward()
    check_gradients(ours, plain)
    plain, ours = pair(mesh=MESHES["fsdp=3"])
    for m in (plain, ours):
        loss_of(m, inputs(1)).backward()
    check_gradients(ours, plain)


def test_state_travels_whole() -> None:
    plain, ours = pair()
    other = Model()
    ours.load_state_dict(other.state_dict())
    torch.testing.assert_close(ours(inputs()).to_torch(), other(inputs()))
    plain.load_state_dict({name: t.to_torch() for name, t in ours.state_dict().items()})
    torch.testing.assert_close(plain(inputs()), other(inputs()))
    assert ours.enter.weight.placements == (Shard(0),)


def test_a_weight_written_before_the_backward_pass_is_noticed() -> None:
    for plain_or_ours in pair():
        loss = loss_of(plain_or_ours)
        with torch.no_grad():
            plain_or_ours.layers[1].up.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_writes_to_weights_within_forward_are_kept(zero: int) -> None:
    class Clamped(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.up.weight.clamp_(-0.1, 0.1)
                self.down.weight.t()[0].zero_()
            self.norm.weight.data = self.norm.weight.data * 2
            return super().forward(x)

    model = Model()
    model.layers[1] = Clamped()
    plain, ours = pair(model, zero=zero)
    for m in (plain, ours):
        loss_of(m).backward()
        loss_of(m).backward()
    check_gradients(ours, plain)
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.to_torch(), b)


def test_gradients_of_gradients() -> None:
    plain, ours = pair()
    for model in (plain, ours):
        grads = torch.autograd.grad(loss_of(model), list(model.parameters()), create_graph=True)
        sum((g**2).sum() for g in grads).backward()
    check_gradients(ours, plain)


def test_a_graph_that_is_kept_serves_twice() -> None:
    plain, ours = pair()
    for model in (plain, ours):
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        loss.backward()
    check_gradients(ours, plain)


def test_a_backward_pass_that_fails_lets_go() -> None:
    plain, ours = pair()
    out = ours.layers[0].register_full_backward_hook(lambda *_: (_ for _ in ()).throw(ValueError("stop")))
    with pytest.raises(ValueError, match="stop"):
        loss_of(ours).backward()
    out.remove()
    ours.zero_grad()
    with metered(GATHER):
        pass
    loss_of(ours).backward()
    loss_of(plain).backward()
    check_gradients(ours, plain)


def test_again_on_another_mesh() -> None:
    plain, ours = pair()
    loss = loss_of(ours)
    dtorch.parallelize(ours, MESHES["fsdp=3"])
    loss_of(ours).backward()
    loss_of(plain).backward()
    check_gradients(ours, plain)
    del loss
    dtorch.parallelize(ours, init_device_mesh("cpu", 2, mesh_dim_names=("dp",)))
    with explain() as report:
        torch.testing.assert_close(ours(inputs()).to_torch(), plain(inputs()))
    assert counts(report) == {}


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_weights_of_any_stride(zero: int) -> None:
    plain, ours = pair(zero=zero)
    for m in (plain, ours):
        wide = m.layers[0].up.weight.detach().repeat(1, 2)
        m.layers[0].up.weight.data = wide[:, ::2]
        m.layers[1].down.weight.data = m.layers[0].up.weight.data.t()
        loss_of(m).backward()
    check_gradients(ours, plain)
