"""A batch is cut along its rows, and each micro-batch counts in the loss as much as it has of what is averaged over."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import nn

import dtorch
from dtorch import UsageError
from dtorch.parallel.pipeline.batch import micro_batches, weights
from dtorch.parallel.pipeline.outputs import put_together, weighted_sum
from tests.models.zoo import ANY_RULE, gpt2, llama
from tests.parallel.pipeline.models import LANGUAGE_MODELS, assert_same_gradients, on, plain, sequential, staged, text

pytestmark = ANY_RULE


def cut(*args: Any, count: int = 2, dims: dict | None = None, **kwargs: Any) -> list:
    return micro_batches(args, kwargs, None, count, dims or {})[0]


def test_the_first_ones_take_the_extra_rows() -> None:
    parts = cut(torch.arange(7), count=3)
    assert [p.args[0].tolist() for p in parts] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [p.rows for p in parts] == [3, 2, 2]
    assert len(cut(torch.arange(3), count=8)) == 3
    assert [p.rows for p in cut(torch.zeros(0, 2))] == [0]


def test_what_has_rows_is_cut_and_all_else_is_not() -> None:
    pair = namedtuple("pair", "a b")
    parts = cut(
        torch.zeros(4, 3), pair(torch.zeros(4), "text"), table=torch.zeros(5, 2), scale=torch.tensor(2.0), flag=True, more=[None]
    )
    for part in parts:
        assert part.args[0].shape == (2, 3) and part.args[1].a.shape == (2,) and part.args[1].b == "text"
        assert part.kwargs["table"].shape == (5, 2) and part.kwargs["scale"].ndim == 0
        assert part.kwargs["flag"] is True and part.kwargs["more"] == [None]


def test_another_dim_may_be_the_batch() -> None:
    x, positions, cache = torch.zeros(4, 3), torch.zeros(3, 4, 5), torch.arange(4)
    parts = cut(x, positions=positions, cache_position=cache, table=torch.zeros(4, 4), dims={"positions": 1, "table": None})
    assert [p.kwargs["positions"].shape for p in parts] == [(3, 2, 5)] * 2
    assert all(p.kwargs["cache_position"] is cache and p.kwargs["table"].shape == (4, 4) for p in parts)
    with pytest.raises(UsageError, match=r"(?s)positions of shape \(3, 5\) for a batch of 4.*batch_dims"):
        cut(x, positions=torch.zeros(3, 5), dims={"positions": 1})


def test_what_cannot_be_cut_is_refused() -> None:
    class Cache:
        pass

    with pytest.raises(UsageError, match=r"(?s)past of type Cache.*use_cache=False"):
        cut(torch.zeros(4), past=Cache())
    assert len(cut(torch.zeros(4), past=Cache(), count=1)) == 1
    with pytest.raises(UsageError, match="no tensor of one dim or more"):
        cut(3.0)


def loss_weights(labels: torch.Tensor, model: nn.Module, count: int = 2, reduction: Any = "mean", **kwargs: Any) -> list[float]:
    return weights(cut(labels=labels, count=count, **kwargs), model, reduction, False)


def test_rows_weigh_alike() -> None:
    assert loss_weights(torch.zeros(5, 4, dtype=torch.long), nn.Linear(1, 1)) == [0.6, 0.4]


def test_labels_weigh_where_some_are_left_out() -> None:
    labels = torch.tensor([[-100, 1, 1], [1, -100, -100], [1, 1, 1], [-100, -100, -100]])
    assert loss_weights(labels, llama()) == loss_weights(labels, gpt2()) == [0.5, 0.5], "the first of a row is not predicted"
    model = nn.Linear(1, 1)
    model.loss_type = "ForMaskedLM"
    assert loss_weights(labels, model) == [0.5, 0.5]
    assert loss_weights(labels, model, 4) == [2 / 6, 1 / 6, 0.5, 0]
    assert loss_weights(torch.full_like(labels, -100), model) == [0.5, 0.5]
    with pytest.raises(UsageError, match=r"(?s)labels of which some are -100, for a Linear.*give reduction="):
        loss_weights(labels, nn.Linear(1, 1))


def test_what_is_counted_can_be_said() -> None:
    labels = torch.tensor([[-100, 1, 1], [1, -100, -100]])
    assert loss_weights(labels, nn.Linear(1, 1), reduction=lambda labels: (labels > 0).sum()) == [2 / 3, 1 / 3]
    assert loss_weights(labels, nn.Linear(1, 1), reduction="sum") == [1, 1]
    assert loss_weights(labels, llama(), num_items_in_batch=3) == [1, 1]
    parts, _ = micro_batches((labels,), {}, labels, 2, {})
    assert weights(parts, nn.Linear(1, 1), "mean", True) == [2 / 3, 1 / 3]
    assert weights(parts, nn.Linear(1, 1), lambda x, target: len(target), True) == [0.5, 0.5]


@pytest.mark.parametrize("m", [2, 3, 5, 8])
def test_a_micro_batch_may_have_no_label_at_all(m: int) -> None:
    model, batch = LANGUAGE_MODELS["llama"](), text()
    batch["labels"][2:5] = -100
    expected = model(**batch).loss
    expected.backward()
    pipe = dtorch.pipeline(on(staged(2), model), m)
    assert pipe.step(**batch).item() == pytest.approx(expected.item(), rel=1e-6)
    assert_same_gradients(pipe.model, model)
    assert pipe(**batch, use_cache=False).loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_losses_that_are_sums() -> None:
    model, x, target = sequential(), torch.randn(7, 6), torch.randint(6, (7,))
    target[1] = -100
    for reduction in ("sum", "mean"):
        model.zero_grad()
        loss_fn = nn.CrossEntropyLoss(reduction=reduction)
        expected = loss_fn(model(x), target)
        expected.backward()
        pipe = dtorch.pipeline(on(staged(2), model), 3, loss_fn=loss_fn, reduction=reduction)
        pipe.model.zero_grad()
        assert pipe.step(x, target=target).item() == pytest.approx(expected.item(), rel=1e-6)
        assert_same_gradients(pipe.model, model)


def test_a_model_is_told_what_to_divide_by() -> None:
    model, batch = LANGUAGE_MODELS["llama"](), {**text(), "num_items_in_batch": 11}
    expected = model(**batch).loss
    pipe = dtorch.pipeline(on(staged(2), model), 3)
    assert pipe.step(**batch).item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_target_is_the_models_where_there_is_no_loss_function() -> None:
    class Model(nn.Sequential):
        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return (super().forward(x) - target).square().mean()

    model, x = Model(*sequential()), torch.randn(5, 6)
    pipe = dtorch.pipeline(on(staged(2), model), 2)
    assert pipe.step(x, target=x).item() == pytest.approx(model(x, x).item(), rel=1e-6)


def test_global_batches_are_cut_too() -> None:
    model, x = sequential(), torch.randn(5, 6)
    pipe = dtorch.pipeline(on(staged(2), model), 2)
    torch.testing.assert_close(plain(pipe(dtorch.Tensor(x))), model(x).detach())


def test_putting_together() -> None:
    joined = put_together([(torch.ones(4, 2), torch.tensor(1.0)), (torch.zeros(2, 2), torch.tensor(4.0))], [2, 1], [2 / 3, 1 / 3])
    assert joined[0].shape == (6, 2) and joined[1].item() == pytest.approx(2)
    assert put_together([torch.tensor(3), torch.tensor(4)], [1, 1], [0.5, 0.5]).tolist() == [3, 4]
    assert put_together([{"a": None}, {"a": None}], [1, 1], [0.5, 0.5]) == {"a": None}
    assert put_together([object, "text"], [1, 1], [0.5, 0.5]) == [object, "text"]
    assert put_together([[torch.ones(1)], []], [1, 1], [0.5, 0.5]) == [[torch.ones(1)], []]
    assert weighted_sum([torch.tensor(torch.nan), torch.tensor(2.0)], [0, 1]).item() == 2
    with pytest.raises(UsageError, match=r"(?s)shapes \[\(3, 1\), \(3, 1\)\].*batch first"):
        put_together([torch.ones(3, 1), torch.ones(3, 1)], [2, 1], [2 / 3, 1 / 3])
