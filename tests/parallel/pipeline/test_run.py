"""A step in micro-batches is one pass of plain PyTorch over the whole batch, whatever the schedule."""

from __future__ import annotations

import pytest
import torch

import dtorch
from dtorch import UsageError, init_device_mesh
from dtorch.parallel.pipeline.schedule import Forward, make_schedule
from tests.models.zoo import ANY_RULE
from tests.parallel.pipeline.models import (
    CELLS,
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


@pytest.mark.parametrize("m", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("devices", "schedule", "stages"), CELLS)
def test_layers_in_a_row(devices: int, schedule: str, stages: int, m: int) -> None:
    model, x, y = sequential(), torch.randn(8, 6), torch.randn(8, 6)
    expected = mean_square(model(x), y)
    expected.backward()
    pipe = dtorch.pipeline(on(staged(devices), model, stages), m, schedule, loss_fn=mean_square)
    loss, output = pipe.step(x, target=y, return_outputs=True)
    assert not loss.requires_grad and loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(plain(output), model(x).detach())
    assert_same_gradients(pipe.model, model)
    torch.testing.assert_close(plain(pipe(x)), model(x).detach())


@pytest.mark.parametrize(("devices", "schedule", "stages"), CELLS)
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_language_models(name: str, devices: int, schedule: str, stages: int) -> None:
    model, batch = LANGUAGE_MODELS[name](), text()
    expected = model(**batch)
    expected.loss.backward()
    distributed = on(staged(devices), model, stages)
    for m in (3, 4):
        distributed.zero_grad()
        pipe = dtorch.pipeline(distributed, m, schedule)
        assert pipe.step(**batch).item() == pytest.approx(expected.loss.item(), rel=1e-6)
        assert_same_gradients(distributed, model)
    output = pipe(**batch, use_cache=False)
    assert type(output) is type(expected) and not output.logits.requires_grad
    assert output.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    torch.testing.assert_close(plain(output.logits), expected.logits.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("schedule", "stages"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
@pytest.mark.parametrize("axes", [("dp", "tp", "pp"), ("pp", "dp", "tp")])
def test_with_data_and_tensor_parallelism(name: str, schedule: str, stages: int, axes: tuple[str, ...]) -> None:
    model, batch = LANGUAGE_MODELS[name](), text()
    expected = model(**batch).loss
    expected.backward()
    pipe = dtorch.pipeline(on(init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=axes), model, stages), 3, schedule)
    assert pipe.step(**batch).item() == pytest.approx(expected.item(), rel=1e-6)
    assert_same_gradients(pipe.model, model)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_steps_in_a_row_train(schedule: str) -> None:
    model, x, y = sequential(), torch.randn(8, 6), torch.randn(8, 6)
    pipe = dtorch.pipeline(on(staged(2), model), 3, schedule, loss_fn=mean_square)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, pipe.model)]
    for _ in range(3):
        expected = mean_square(model(x), y)
        expected.backward()
        assert pipe.step(x, target=y).item() == pytest.approx(expected.item(), rel=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_without_a_pipeline_it_accumulates() -> None:
    model, x, y = sequential(), torch.randn(6, 6), torch.randn(6, 6)
    mean_square(model(x), y).backward()
    pipe = dtorch.pipeline(on(init_device_mesh("cpu", 2, mesh_dim_names=("dp",)), model), 3, loss_fn=mean_square)
    pipe.step(x, target=y)
    assert_same_gradients(pipe.model, model)


def test_micro_batches_too_short_to_be_split() -> None:
    model, batch = LANGUAGE_MODELS["llama"](), text(7)
    expected = model(**batch).loss
    expected.backward()
    pipe = dtorch.pipeline(on(init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "pp")), model), 3)
    assert pipe.step(**batch).item() == pytest.approx(expected.item(), rel=1e-6)
    assert_same_gradients(pipe.model, model)


def test_gradients_are_added_to_those_that_are_there() -> None:
    model, x, y = sequential(), torch.randn(6, 6), torch.randn(6, 6)
    pipe = dtorch.pipeline(on(staged(2), model), 3, loss_fn=mean_square)
    pipe.step(x, target=y)
    before = [p.grad for p in pipe.model.parameters()]
    pipe.step(x, target=y)
    for _ in range(2):
        mean_square(model(x), y).backward()
    assert_same_gradients(pipe.model, model)
    assert all(p.grad is b for p, b in zip(pipe.model.parameters(), before, strict=True)), "in place, as PyTorch does"


def test_a_batch_of_fewer_rows_makes_fewer_micro_batches() -> None:
    model, x, y = sequential(), torch.randn(3, 6), torch.randn(3, 6)
    mean_square(model(x), y).backward()
    pipe = dtorch.pipeline(on(staged(2), model), 8, loss_fn=mean_square)
    pipe.step(x, target=y)
    assert_same_gradients(pipe.model, model)


@pytest.mark.parametrize("axes", [(("pp",), (2,)), (("pp", "tp"), (2, 2))])
def test_each_tensor_crosses_once(axes: tuple) -> None:
    names, sizes = axes
    model = on(init_device_mesh("cpu", sizes, mesh_dim_names=names), LANGUAGE_MODELS["llama"]())
    batch, m = text(), 4
    with dtorch.explain() as alone:
        model(**batch).loss.backward()
    with dtorch.explain() as report:
        dtorch.pipeline(model, m).step(**batch)
    crossings = [[e for e in r.events if e.comm.kind == "transfer"] for r in (alone, report)]
    assert crossings[0] and len(crossings[1]) == m * len(crossings[0])


def test_layers_send_one_tensor_forward_and_one_back() -> None:
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    pipe = dtorch.pipeline(on(staged(4), sequential()), 4, loss_fn=mean_square)
    with dtorch.explain() as report:
        pipe.step(x, target=y)
    assert len(report.events) == 4 * 3 * 2
    with dtorch.explain() as report:
        pipe(x)
    assert len(report.events) == 4 * 3


def test_the_program_order_is_the_schedules() -> None:
    seen: list[int] = []
    model = on(staged(2), sequential(4))
    for number, layer in enumerate(model):
        layer.register_forward_hook(lambda *_, number=number: seen.append(number))
    pipe = dtorch.pipeline(model, 3, "1f1b", loss_fn=mean_square)
    pipe.step(torch.randn(6, 6), target=torch.randn(6, 6))
    assert pipe.schedule == make_schedule("1f1b", 2, 3)
    forward = [unit for unit in pipe.schedule.order if isinstance(unit, Forward)]
    assert seen == [layer for unit in forward for layer in (2 * unit.stage, 2 * unit.stage + 1)]
    assert str(pipe).startswith("1f1b: 3 micro-batches, idle 25%\ndevice 0  F0 F1 .  B0 F2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batches": 0}, "micro_batches=0"),
        ({"micro_batches": 2, "schedule": "zigzag"}, "schedule='zigzag'"),
        ({"micro_batches": 2, "schedule": "interleaved"}, "virtual_stages=2"),
        ({"micro_batches": 2, "reduction": "max"}, "reduction='max'"),
        ({"micro_batches": 2, "batch_dims": {"positions": 1}}, r"(?s)batch_dims of \['positions'\].*takes \['input'\]"),
    ],
)
def test_what_is_refused_when_it_is_made(options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        dtorch.pipeline(on(staged(2), sequential()), **options)


def test_a_model_on_no_mesh_is_refused() -> None:
    with pytest.raises(UsageError, match=r"(?s)lies on no mesh.*call dtorch.parallelize"):
        dtorch.pipeline(sequential(), 2)


def test_a_step_without_gradients_or_loss_is_refused() -> None:
    pipe = dtorch.pipeline(on(staged(2), sequential()), 2)
    with torch.no_grad(), pytest.raises(UsageError, match="gradients are switched off"):
        pipe.step(torch.randn(4, 6))
    with pytest.raises(UsageError, match=r"(?s)without a loss.*loss_fn"):
        pipe.step(torch.randn(4, 6))


def test_stages_that_no_layer_is_left_for_are_refused_before_anything_moves() -> None:
    model = sequential(8)
    with (
        dtorch.explain() as report,
        pytest.raises(UsageError, match=r"(?s)12 pipeline stages \(4 devices x 3 virtual.*at most 2"),
    ):
        dtorch.parallelize(model, staged(4), virtual_stages=3)
    assert not report.events and not any(isinstance(p, dtorch.Tensor) for p in model.parameters())
    with pytest.raises(UsageError, match=r"make pp at most 8, and virtual_stages"):
        dtorch.parallelize(model, staged(9), virtual_stages=2)
    with pytest.raises(UsageError, match=r"virtual_stages=0"):
        dtorch.parallelize(model, staged(2), virtual_stages=0)


def test_virtual_stages_go_round() -> None:
    mesh = staged(2)
    model = on(mesh, sequential(5), 2)
    first, second = mesh.unbind("pp")
    homes = [layer[0].weight.device_mesh for layer in model]
    assert homes == [first, first, second, first, second]
    assert "stage 2 on ids 0: 1 layers" in str(dtorch.describe(model))
