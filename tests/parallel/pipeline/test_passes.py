"""Models that are more than layers in a row: tensors go by other ways, hooks look on, modes are in force, things fail."""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import dtorch
from dtorch.parallel.hooks import moves_of
from dtorch.parallel.pipeline.gradients import Gradients
from dtorch.parallel.pipeline.passes import Pass
from dtorch.testing.sessions import own_session
from tests.models.zoo import ANY_RULE, bert, mixtral, without_dropout
from tests.parallel.pipeline.models import (
    LANGUAGE_MODELS,
    assert_same_gradients,
    mean_square,
    on,
    plain,
    sequential,
    staged,
    text,
)

pytestmark = ANY_RULE
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)]


class Layer(nn.Module):
    """A layer that may be given more than one tensor, and may write to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, *others: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        if scale is not None:
            x.mul_(scale)
        for other in others:
            x = x + other
        return self.linear(x).tanh()


class Stack(nn.Module):
    """Eight layers; how they are wired is left to a function of the model and its input."""

    def __init__(self, wiring: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(8))
        self.outlet = nn.Linear(6, 6)
        self.wiring = wiring

    def forward(self, x: torch.Tensor) -> Any:
        return self.wiring(self, x)


def skipping(m: Stack, x: torch.Tensor) -> torch.Tensor:
    """Every layer is given the input's embedding, and the one four before it."""
    seen = [m.inlet(x)]
    for i, layer in enumerate(m.layers):
        seen.append(layer(seen[-1], seen[0], *seen[i - 4 : i - 3]))
    return m.outlet(seen[-1] + seen[3])


def summed_up(m: Stack, x: torch.Tensor) -> torch.Tensor:
    """Results of all stages meet in operators outside of modules."""
    h, total = m.inlet(x), 0
    for layer in m.layers:
        h = layer(h)
        total = total + h.square().mean(1)
    return m.outlet(h) + total[:, None]


def tied_twice(m: Stack, x: torch.Tensor) -> torch.Tensor:
    """A weight of the first stage is used at the end, and what a middle layer gave goes there past all modules."""
    h = middle = m.inlet(x)
    for i, layer in enumerate(m.layers):
        h = layer(h)
        middle = h if i == 3 else middle
    return m.inlet(h) + middle


def written_in_place(m: Stack, x: torch.Tensor) -> torch.Tensor:
    """Each layer's input is written to."""
    h = m.inlet(x)
    for layer in m.layers:
        h = layer(h + 0, scale=1.5) + 0
        h.mul_(0.5)
    return m.outlet(h)


def partly_frozen(m: Stack, x: torch.Tensor) -> torch.Tensor:
    """The first half needs no gradient."""
    with torch.no_grad():
        h = m.inlet(x)
        for layer in m.layers[:4]:
            h = layer(h)
    for layer in m.layers[4:]:
        h = layer(h)
    return m.outlet(h)


def leaving_early(m: Stack, x: torch.Tensor) -> torch.Tensor:
    """The later stages have nothing to do."""
    return m.layers[1](m.layers[0](m.inlet(x)))


def jumping(m: Stack, x: torch.Tensor) -> torch.Tensor:
    """Stages in the middle have nothing to do."""
    return m.outlet(m.layers[7](m.layers[0](m.inlet(x))))


def going_back(m: Stack, x: torch.Tensor) -> torch.Tensor:
    """An early layer is used again at the end."""
    h = m.inlet(x)
    for layer in (*m.layers, m.layers[0], m.layers[7]):
        h = layer(h)
    return m.outlet(h)


def checkpointed(m: Stack, x: torch.Tensor) -> torch.Tensor:
    """Layers are computed again for backward."""
    h = m.inlet(x)
    for layer in m.layers:
        h = checkpoint(layer, h, use_reentrant=False)
    return m.outlet(h)


def gradients_inside(m: Stack, x: torch.Tensor) -> torch.Tensor:
    """A gradient is taken while the model runs."""
    h = m.inlet(x)
    for layer in m.layers:
        h = layer(h)
    probe = h.detach().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(m.outlet(probe).square().sum(), probe)
    return m.outlet(h) + slope


WIRINGS = [
    skipping,
    summed_up,
    tied_twice,
    written_in_place,
    partly_frozen,
    leaving_early,
    jumping,
    going_back,
    checkpointed,
    gradients_inside,
]


@pytest.mark.parametrize(("schedule", "stages"), SCHEDULES)
@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("wiring", WIRINGS)
def test_any_wiring(wiring: Callable, devices: int, schedule: str, stages: int) -> None:
    model, x, y = Stack(wiring), torch.randn(7, 6), torch.randn(7, 6)
    expected = mean_square(model(x), y)
    expected.backward()
    pipe = dtorch.pipeline(on(staged(devices), model, stages), 3, schedule, loss_fn=mean_square)
    assert pipe.step(x, target=y).item() == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradients(pipe.model, model)
    torch.testing.assert_close(plain(pipe(x)), model(x).detach())


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize(("schedule", "stages"), SCHEDULES[:2])
@pytest.mark.parametrize("tie", [False, True])
def test_router_logits_of_all_stages_meet_in_the_loss(tie: bool, schedule: str, stages: int, devices: int) -> None:
    model = mixtral(num_hidden_layers=4, tie_word_embeddings=tie)
    without_dropout(model)
    batch = {k: v for k, v in text(4).items() if k != "attention_mask"}
    batch["labels"] = batch["input_ids"]
    parts = [{k: v[i : i + 2] for k, v in batch.items()} for i in (0, 2)]
    losses = [model(**part, output_router_logits=True).loss for part in parts]
    (sum(losses) / 2).backward()
    pipe = dtorch.pipeline(on(staged(devices), model, stages), 2, schedule)
    loss = pipe.step(**batch, output_router_logits=True)
    assert loss.item() == pytest.approx(sum(losses).item() / 2, rel=1e-5)
    assert_same_gradients(pipe.model, model)


def test_an_encoder_with_a_tied_decoder() -> None:
    model = without_dropout(bert(num_hidden_layers=4))
    batch = text()
    expected = model(**batch).loss
    expected.backward()
    pipe = dtorch.pipeline(on(staged(2), model), 3)
    assert pipe.step(**batch).item() == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradients(pipe.model, model)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_models_own_checkpointing(use_reentrant: bool) -> None:
    model, batch = LANGUAGE_MODELS["llama"](), text()
    model(**batch).loss.backward()
    distributed = on(staged(2), model)
    distributed.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    pipe = dtorch.pipeline(distributed, 3)
    if use_reentrant:
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            pipe.step(**batch)
    else:
        pipe.step(**batch)
        assert_same_gradients(distributed, model)


def test_hidden_states_of_all_layers() -> None:
    model, batch = LANGUAGE_MODELS["llama"](), text()
    expected = model(**batch, output_hidden_states=True)
    pipe = dtorch.pipeline(on(staged(2), model), 3)
    loss, output = pipe.step(**batch, output_hidden_states=True, return_outputs=True)
    assert loss.item() == output.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert len(output.hidden_states) == 9
    for a, b in zip(output.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(plain(a), b.detach(), rtol=1e-5, atol=1e-5)


def test_hooks_see_the_whole_gradient_once() -> None:
    seen: list[tuple[str, float]] = []

    def watched(m: Stack, x: torch.Tensor) -> torch.Tensor:
        h = m.inlet(x)
        for layer in m.layers:
            h = layer(h, h * 0.5)
            h.register_hook(lambda g: seen.append(float(g.square().sum())) or g.clamp(-1e-3, 1e-3))
        return m.outlet(h)

    model, x, y = Stack(watched), torch.randn(4, 6), torch.randn(4, 6)
    for i in (0, 2):
        (mean_square(model(x[i : i + 2]), y[i : i + 2]) / 2).backward()
    expected = sorted(seen)
    seen.clear()
    pipe = dtorch.pipeline(on(staged(4), model), 2, loss_fn=mean_square)
    pipe.step(x, target=y)
    assert sorted(seen) == pytest.approx(expected, rel=1e-4)
    assert_same_gradients(pipe.model, model)


@dataclasses.dataclass
class Answer:
    value: torch.Tensor
    extra: dict[str, Any]
    loss: torch.Tensor | None = None


def test_outputs_of_any_form() -> None:
    def wiring(m: Stack, x: torch.Tensor) -> Answer:
        h = m.outlet(leaving_early(m, x))
        return Answer(h, {"pair": (h[:, 0], [h.sum(1)]), "note": "text", "long": h.flatten()}, h.square().mean())

    model, x = Stack(wiring), torch.randn(5, 6)
    expected = model(x)
    pipe = dtorch.pipeline(on(staged(2), model), 2)
    for output in (pipe(x), pipe.step(x, return_outputs=True)[1]):
        assert type(output) is Answer and output.extra["note"] == "text"
        torch.testing.assert_close(plain(output.value), expected.value.detach())
        torch.testing.assert_close(plain(output.extra["pair"][1][0]), expected.value.sum(1).detach())
        torch.testing.assert_close(plain(output.extra["long"]), expected.value.flatten().detach())
        assert output.loss.item() == pytest.approx(expected.loss.item())


@pytest.mark.parametrize("as_leaf", [True, False])
def test_inputs_that_want_their_gradient(as_leaf: bool) -> None:
    model, y = sequential(), torch.randn(5, 6)
    pipe = dtorch.pipeline(on(staged(2), model), 3, loss_fn=mean_square)
    source = torch.randn(5, 6)
    found = []
    for run in (lambda x: mean_square(model(x), y).backward(), lambda x: pipe.step(x, target=y)):
        leaf = source.clone().requires_grad_()
        run(leaf if as_leaf else leaf * 2)
        found.append(plain(leaf.grad))
    torch.testing.assert_close(found[1], found[0])


def test_dropout_is_the_same_by_every_schedule() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4)) for _ in range(8)))
    x, y, grads = torch.randn(6, 6), torch.randn(6, 6), []
    torch.manual_seed(5)
    seeds = torch.randint(2**62, (3,)).tolist()
    after = torch.rand(1)
    for i, seed in enumerate(seeds):
        torch.manual_seed(seed)
        (mean_square(model(x[2 * i : 2 * i + 2]), y[2 * i : 2 * i + 2]) / 3).backward()
    for schedule, stages in SCHEDULES:
        torch.manual_seed(5)
        pipe = dtorch.pipeline(on(staged(2), model, stages), 3, schedule, loss_fn=mean_square)
        pipe.model.zero_grad()
        pipe.step(x, target=y)
        assert torch.equal(torch.rand(1), after), "of the program's own numbers one is drawn for each micro-batch"
        assert_same_gradients(pipe.model, model)
        grads.append(plain(pipe.model[0][0].weight.grad))
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])


class Counting(TorchFunctionMode):
    """Counts calls of ``tanh``, the model's only."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.calls += func is torch.Tensor.tanh
        return func(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    """Counts operators."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_modes_of_the_caller_are_in_force() -> None:
    def wiring(m: Stack, x: torch.Tensor) -> torch.Tensor:
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        h = m.layers[7](leaving_early(m, x), torch.ones(6))
        types.append(m.outlet(h).dtype)
        return h

    seen: list[tuple] = []
    types: list[torch.dtype] = []
    packed: list[int] = []
    pipe = dtorch.pipeline(on(staged(2), Stack(wiring)), 2, loss_fn=lambda out: out.float().square().mean())
    with torch.autocast("cpu", torch.bfloat16), saved_tensors_hooks(lambda t: packed.append(1) or t, lambda t: t):
        pipe.step(torch.randn(4, 6))
    assert seen == [(True, True, False)] * 2 and types == [torch.bfloat16] * 2 and packed
    assert all(p.grad is None or p.grad.dtype is torch.float32 for p in pipe.model.parameters())
    seen.clear()
    with torch.inference_mode():
        assert pipe(torch.randn(4, 6)).is_inference()
    with Counting() as counting, Dispatched() as dispatched:
        pipe(torch.randn(4, 6))
        assert counting.calls == 6 and dispatched.calls > 6
    assert seen == [(False, False, True)] * 2 + [(False, False, False)] * 2


def test_a_default_mesh_within_the_model_is_its_own() -> None:
    def wiring(m: Stack, x: torch.Tensor) -> torch.Tensor:
        with dtorch.use_mesh(first):
            h = leaving_early(m, x)
            h = m.layers[7](h + m.layers[0](torch.ones(6)))
            made.append(torch.zeros(1).device_mesh)
        made.append(dtorch.zeros(1).device_mesh)
        return h

    made: list[Any] = []
    first, second = staged(2).unbind("pp")
    pipe = dtorch.pipeline(on(staged(2), Stack(wiring)), 3, "gpipe")
    with dtorch.use_mesh(second):
        pipe(torch.randn(6, 6))
        assert made == [first, second] * 3 and dtorch.zeros(1).device_mesh is second


def fails_at(layer: int, call: int, error: Callable[[], None]) -> nn.Module:
    """A model of which one layer fails when it is called for some time."""
    model, calls = on(staged(2), sequential()), []

    def hook(*_: Any) -> None:
        calls.append(1)
        if len(calls) == call:
            error()

    model[layer].register_forward_hook(hook)
    return model


def fail() -> None:
    raise ValueError("stop")


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C raises, also where the tests run in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("error", "kind"), [(fail, ValueError), (interrupt, KeyboardInterrupt)])
@pytest.mark.parametrize("call", [1, 3])
@pytest.mark.parametrize("layer", [1, 6])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.usefixtures("ctrl_c")
def test_a_failure_leaves_everything_as_it_was(
    schedule: str, layer: int, call: int, error: Callable[[], None], kind: type[BaseException]
) -> None:
    model = fails_at(layer, call + 4, error)
    pipe = dtorch.pipeline(model, 4, schedule, loss_fn=mean_square)
    x, y, threads = torch.randn(8, 6), torch.randn(8, 6), threading.active_count()
    pipe.step(x, target=y)
    before = [(p.detach().clone(), p.grad, p.grad.clone()) for p in model.parameters()]
    with pytest.raises(kind):
        pipe.step(x, target=y)
    assert threading.active_count() == threads
    for p, (value, grad, copied) in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, value) and p.grad is grad and torch.equal(grad, copied)
    assert moves_of(model).passing is None and moves_of(model).depth == 0 and not moves_of(model).made
    pipe.step(x, target=y)
    assert torch.allclose(model[0][0].weight.grad, 2 * before[0][2])


def test_a_failure_in_backward_is_undone_too() -> None:
    def wiring(m: Stack, x: torch.Tensor) -> torch.Tensor:
        h = leaving_early(m, x)
        h.register_hook(lambda g: fail())
        return m.outlet(m.layers[7](h))

    model = on(staged(2), Stack(wiring))
    with pytest.raises(ValueError, match="stop"):
        dtorch.pipeline(model, 3, loss_fn=mean_square).step(torch.randn(6, 6), target=torch.randn(6, 6))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(("schedule", "passes"), [("gpipe", 8), ("1f1b", 2)])
def test_activations_are_let_go_of_as_the_schedule_says(schedule: str, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def watched(run: Callable) -> Callable:
        def hold(self: Pass, stage: int) -> None:
            run(self, stage)
            client.flush()
            client.flush()
            pieces = [t for value in worker.store.values() for t in value if t.shape == (512, 6)]
            sizes.append(len({t.untyped_storage().data_ptr() for t in pieces}))

        return hold

    with own_session() as (client, worker):
        model = on(staged(2), sequential(4))
        pipe = dtorch.pipeline(model, 8, schedule, loss_fn=mean_square)
        x = dtorch.randn(8 * 512, 6, device_mesh=staged(2).unbind("pp")[0])
        monkeypatch.setattr(Pass, "forward", watched(Pass.forward))
        monkeypatch.setattr(Pass, "backward", watched(Pass.backward))
        pipe.step(x, target=torch.zeros(8 * 512, 6))
    # A stage's pass keeps the input and the result of each of its layers, more or less.
    assert passes * 5 <= max(sizes) <= passes * 6 + 4, sizes
    assert sizes[-1] <= 1


def test_gradients_are_put_back_in_place() -> None:
    gradients, p = Gradients(), nn.Parameter(torch.zeros(2))
    p.grad = kept = torch.ones(2)
    node = torch.autograd.graph.get_gradient_edge(p).node
    gradients.add(node, torch.ones(2))
    gradients.add(node, torch.ones(2))
    assert p.grad.tolist() == [2, 2]
    gradients.keep()
    assert p.grad is kept and kept.tolist() == [3, 3]
