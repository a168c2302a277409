"""The controller's state: events in, orders out, no I/O."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from dtorch.controller.state import STORY_LENGTH, BatchArrived, ControllerState, merged
from dtorch.core.hosting import Hosting
from dtorch.core.program import Call, Calls, DefinePlan, Draw, Forget, Free, MeshInfo, Put

ONE = MeshInfo("cpu", [1], [0])
PLAN = DefinePlan(7, "aten::mm.default", [ONE], [], [], 0, [], [])


@pytest.fixture
def state() -> ControllerState:
    return ControllerState()


def test_a_batch_goes_on_whole(state: ControllerState) -> None:
    batch = [PLAN, Calls.of(Call(7, [], [1], []))]
    ((workers, sent),) = state.handle(BatchArrived(5, batch))
    assert workers == (0,) and sent is batch


def test_counters(state: ControllerState) -> None:
    state.handle(BatchArrived(0, [Calls.of(Call(7, [], [1], []))] * 3))
    state.handle(BatchArrived(3, [Put(2, ONE, [], [torch.zeros(4), torch.zeros(2)]), Draw(7, [], [3], [], None), Free([1])]))
    counters = state.counters
    assert (counters.calls, counters.batches, counters.put_nbytes) == (4, 2, 24)


def test_plans_come_and_go(state: ControllerState) -> None:
    state.handle(BatchArrived(0, [PLAN]))
    assert state.plans == {7: "aten::mm.default"}
    state.handle(BatchArrived(0, [Forget([7, 8])]))
    assert state.plans == {}


def test_the_story_names_what_was_asked_last(state: ControllerState) -> None:
    state.handle(BatchArrived(0, [PLAN, Put(3, ONE, [], []), Calls.of(Call(7, [3], [4], []))]))
    story = state.story().splitlines()
    assert story[0] == "batch of 3 from call 0"
    assert story[-2:] == ["  Put 3", "  Call aten::mm.default (plan 7): values [3] -> [4]"]


def test_the_story_is_bounded_and_keeps_no_tensor(state: ControllerState) -> None:
    tensor = torch.zeros(3)
    gone = weakref.ref(tensor)
    state.handle(BatchArrived(0, [Put(1, ONE, [], [tensor])]))
    del tensor
    gc.collect()
    assert gone() is None
    for n in range(50):
        state.handle(BatchArrived(n, [Calls.of(Call(7, [], [n], []))] * 20))
    assert len(state.story().splitlines()) == STORY_LENGTH


def test_each_worker_gets_what_it_holds_of_what_is_put() -> None:
    row = MeshInfo("cpu", [3], [0, 1, 2])
    tensors = [torch.full((1,), float(n)) for n in range(3)]
    first, second = ControllerState(Hosting(2)).handle(BatchArrived(4, [PLAN, Put(2, row, [0], tensors), Free([1])]))
    assert (first[0], second[0]) == ((0,), (1,))
    assert [t.item() for t in first[1][1].tensors] == [0, 2] and [t.item() for t in second[1][1].tensors] == [1]
    other = ControllerState(Hosting(2)).handle(BatchArrived(0, [Put(2, ONE, [], tensors[:1])]))
    assert [len(batch) for _, batch in other] == [1, 0]


def test_what_is_not_put_goes_to_all_at_once() -> None:
    batch = [PLAN, Free([1])]
    ((workers, sent),) = ControllerState(Hosting(3)).handle(BatchArrived(0, batch))
    assert workers == (0, 1, 2) and sent is batch


def test_answers_of_several_workers_are_one() -> None:
    assert merged([[1, None, None], [None, 2, None]]) == [1, 2, None]
    assert merged([None, 7, 8]) == 7 and merged([None, None]) is None
