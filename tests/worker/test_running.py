"""Runs of packed calls, in C and in Python: order, places, failures, and words that are no calls."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dtorch.core.compiled import PURE_PYTHON
from dtorch.core.program import Call, Calls
from dtorch.worker import running
from dtorch.worker.running import run_calls
from dtorch.worker.store import Poison, Store

C_MODULE = running.fastrun


@pytest.fixture(
    params=[pytest.param(m, id="python" if m is None else "c") for m in dict.fromkeys([None, C_MODULE])], autouse=True
)
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(running, "fastrun", request.param)
    yield request.param


def add(store: Store, call: Call) -> None:
    a, b = (store[h][0] for h in call.inputs)
    store[call.outputs[0]] = (a + b * (call.scalars[0] if call.scalars else 1),)


def store_of(**values: float) -> Store:
    return Store({int(k[1:]): (torch.tensor(v),) for k, v in values.items()})


def test_calls_run_in_order_with_their_numbers() -> None:
    store = store_of(v1=1.0, v2=10.0)
    calls = Calls.of(Call(5, [1, 2], [3], []), Call(5, [3, 2], [4], [2]), Call(5, [4, 4], [2**40], [0.5]))
    run_calls(calls, running.beginning(), {5: add}, store)
    assert [store[h][0].item() for h in (3, 4, 2**40)] == [11, 31, 46.5]


def test_a_run_ends_with_the_place_after_it() -> None:
    place, calls = running.beginning(), Calls.of(Call(5, [1, 1], [3], [2]), Call(5, [3, 1], [4], []))
    run_calls(calls, place, {5: add}, store_of(v1=1.0))
    assert place.tolist() == [2, 14, 1] and list(calls.unpacked(*place[1:])) == []


def test_an_error_leaves_the_place_at_its_call() -> None:
    store, place = store_of(v1=1.0, v2=2.0), running.beginning()
    calls = Calls.of(Call(5, [1, 2], [3], [4]), Call(5, [9, 2], [4], [5]), Call(5, [1, 2], [6], [7]))
    with pytest.raises(KeyError):
        run_calls(calls, place, {5: add}, store)
    assert place.tolist() == [1, 7, 1] and sorted(store) == [1, 2, 3]
    running.step(place, next(calls.unpacked(place[1], place[2])))
    run_calls(calls, place, {5: add}, store)
    assert store[6][0].item() == 15


def test_an_unknown_plan_is_an_error_at_its_call() -> None:
    place = running.beginning()
    with pytest.raises(KeyError):
        run_calls(Calls.of(Call(5, [1, 1], [3], []), Call(6, [], [], [])), place, {5: add}, store_of(v1=1.0))
    assert place.tolist() == [1, 7, 0]


@pytest.mark.parametrize(
    "words", [[5], [5, 2, 1], [5, 2, 1, 0, 1, 1], [5, 1, 1, 9, 1, 2], [5, -1, 1, 0, 1], [5, 2**62, 2**62, 2**62, 0, 0]]
)
def test_words_that_are_no_calls_are_refused(words: list[int]) -> None:
    with pytest.raises((ValueError, IndexError, KeyError)):
        run_calls(Calls(array("q", words).tobytes(), [], 1), running.beginning(), {5: add}, store_of(v1=1.0))


def test_bytes_that_are_no_words_are_refused() -> None:
    with pytest.raises((ValueError, TypeError)):
        run_calls(Calls(array("q", [5, 0, 1, 0, 3]).tobytes() + b"x", [], 1), running.beginning(), {5: add}, store_of(v1=1.0))


@pytest.mark.parametrize("words", [[5, -4, 0, 0], [5, 0, -4, 0], [5, 0, 0, -1], [5, 0, 0, 1], [5, 1, 0, 0]])
def test_words_that_are_no_calls_are_not_unpacked(words: list[int]) -> None:
    with pytest.raises(ValueError):
        list(Calls(array("q", words).tobytes(), [], 1).unpacked())


@pytest.mark.parametrize(
    "parts", [((0, -1, None),), ((1, -1, None),), ((9, 0, None),), ((3, 2, None), (0, 0, None)), ((-1, 0, 1),)]
)
def test_parts_that_are_none_are_refused(parts: tuple) -> None:
    if C_MODULE is not None:
        with pytest.raises(ValueError):
            C_MODULE.Single(print, parts, None)


def test_a_single_plan_takes_slots_scalars_constants_and_lists() -> None:
    if C_MODULE is None:
        assert os.environ.get(PURE_PYTHON) == "1", "the C module was not built"
        return
    seen: list[tuple] = []

    def fn(*args: Any, **kwargs: Any) -> str:
        seen.append((args, kwargs))
        return "made"

    slot, scalar, constant, some = range(4)
    parts = ((some, 2, None), (slot, 1, None), (scalar, 0, None), (constant, 0, "c"), (slot, 0, None))
    single = C_MODULE.Single(fn, parts, ("out",))
    store = Store({1: ("one",), 2: ["two"]})
    C_MODULE.run_calls(Calls.of(Call(5, [1, 2], [3], [7])).words, [7], running.beginning(), {5: single}, store, Call)
    assert seen == [((["two", 7], "c"), {"out": "one"})] and store[3] == ("made",)
    for call in [Call(5, [1], [3], [7]), Call(5, [1, 2], [3], []), Call(5, [1, 2], [3, 4], [7]), Call(5, [1, 9], [3], [7])]:
        with pytest.raises((IndexError, KeyError)):
            C_MODULE.run_calls(Calls.of(call).words, list(call.scalars), running.beginning(), {5: single}, store, Call)
    store[2] = Poison(None)  # type: ignore[arg-type,assignment]
    with pytest.raises(TypeError):
        C_MODULE.run_calls(Calls.of(Call(5, [1, 2], [3], [7])).words, [7], running.beginning(), {5: single}, store, Call)
    assert len(seen) == 1
