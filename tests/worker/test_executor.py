"""The executor: order, failures and poison, draws, and that nothing it hands out is an alias."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtorch.core.program import (
    Barrier,
    Call,
    Calls,
    Const,
    DefinePlan,
    Draw,
    Failure,
    Fetch,
    Forget,
    Free,
    Instruction,
    Local,
    MeshInfo,
    Put,
    Reply,
    Scalar,
    Shutdown,
    Slot,
)
from dtorch.worker import executor as executor_module
from dtorch.worker.executor import Executor
from tests.worker.plans import ADD, ONE, sharded, single

PAIR = MeshInfo("cpu", [2, 2], [4, 5, 6, 7])
MM = single(2, "aten::mm.default", Slot(0), Slot(1), inputs=2)
ADD_STEP = Local("aten::add_.Tensor", [Slot(0), Slot(1)], {}, [2], [])
ADD_INTO = DefinePlan(3, "aten::add_.Tensor", [ONE], [[]] * 3, [0] * 3, 2, [ADD_STEP], [0])
SELECT = single(4, "aten::select.int", Slot(0), 0, 0)
RAND = single(5, "aten::rand.default", [3], inputs=0, device=Const("device", "cpu"))


def call(*parts: Any) -> Calls:
    return Calls.of(Call(*parts))


def put(handle: int, value: Any) -> Put:
    return Put(handle, ONE, [], [value if isinstance(value, torch.Tensor) else torch.tensor(value)])


@pytest.fixture
def executor() -> Executor:
    made = Executor()
    made.submit(0, [ADD, MM, ADD_INTO, SELECT, RAND, put(1, [1.0, 2.0]), put(2, [10.0, 20.0])])
    return made


def fetch(executor: Executor, handle: int) -> list:
    reply = executor.run(0, [Fetch(handle, ONE, [])])
    assert reply.failures == []
    return [t.tolist() for t in reply.result]


def failure_of(reply: Reply) -> Failure:
    assert len(reply.failures) == 1
    return reply.failures[0]


def test_calls_run_in_order(executor: Executor) -> None:
    executor.submit(0, [call(1, [1, 2], [3], []), call(1, [3, 3], [4], [])])
    assert fetch(executor, 4) == [[22, 44]]


def test_a_fetched_value_is_a_copy_without_history(executor: Executor) -> None:
    (tensor,) = executor.run(0, [Fetch(1, ONE, [])]).result
    tensor.zero_()
    assert fetch(executor, 1) == [[1, 2]] and not tensor.requires_grad


def test_pieces_and_descriptions(executor: Executor) -> None:
    pieces = [torch.zeros(2, 3).t(), torch.ones(1, dtype=torch.bfloat16)]
    executor.submit(0, [Put(9, PAIR, [0], pieces)])
    assert executor.run(0, [Fetch(9, PAIR, [0])]).result[1].tolist() == [1]
    assert executor.run(0, [Fetch(9, PAIR, [0], describe=True)]).result == [[[3, 2], [1, 3], "float32"], [[1], [1], "bfloat16"]]


def test_what_is_put_needs_no_gradient_and_is_not_copied(executor: Executor) -> None:
    given = torch.ones(2, requires_grad=True)
    executor.submit(0, [put(9, given), call(3, [9, 1], [9], [])])
    assert given.tolist() == [2, 3] and not executor.run(0, [Fetch(9, ONE, [])]).result[0].requires_grad


def test_freed_and_forgotten(executor: Executor) -> None:
    executor.submit(0, [Free([1, 77]), Forget([1, 99])])
    assert 1 not in executor.store
    assert "value 1 is not stored" in failure_of(executor.run(0, [Fetch(1, ONE, [])])).message
    assert "plan 1 is not defined" in failure_of(executor.run(0, [call(1, [2, 2], [3], [])])).message


def test_only_the_last_instruction_is_answered(executor: Executor) -> None:
    assert executor.run(0, [Fetch(1, ONE, []), call(1, [1, 2], [3], [])]).result is None
    assert executor.run(0, [Fetch(1, ONE, []), Barrier()]).result is None
    assert executor.run(0, []).result is None


def test_shutdown_releases_everything(executor: Executor) -> None:
    executor.run(0, [Shutdown()])
    assert executor.store == {}
    assert "not defined" in failure_of(executor.run(0, [call(1, [1, 2], [3], [])])).message


def test_a_failure_tells_everything(executor: Executor) -> None:
    executor.submit(0, [put(8, torch.ones(2, 3)), put(9, torch.ones(2, 4))])
    failure = failure_of(executor.run(40, [call(1, [1, 2], [3], []), Barrier(), call(2, [8, 9], [10], []), Barrier()]))
    assert (failure.sequence, failure.operator, failure.plan) == (41, "aten::mm.default", 2)
    assert (failure.device, failure.shapes) == ("cpu:0", "[2, 3] float32, [2, 4] float32")
    assert failure.message.startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied")
    assert "Traceback" in failure.traceback and "mat1 and mat2" in failure.traceback


def test_a_failure_names_the_devices_of_the_failing_piece(executor: Executor) -> None:
    plan = sharded(6, "aten::mm.default", Slot(0), Slot(0), mesh=PAIR)
    pieces = [torch.ones(2, 2), torch.ones(2, 3)]
    failure = failure_of(executor.run(0, [plan, Put(9, PAIR, [0], pieces), call(6, [9], [10], []), Barrier()]))
    assert (failure.device, failure.shapes) == ("cpu:6,7", "[2, 3] float32")


def test_poison_spreads_silently_and_is_told_once(executor: Executor) -> None:
    executor.submit(7, [call(2, [1, 2], [3], []), call(1, [3, 1], [4], []), call(1, [1, 4], [5], [])])
    failure = failure_of(executor.run(10, [Barrier()]))
    assert failure.sequence == 7
    assert executor.run(10, [Barrier()]).failures == []
    assert executor.run(10, [Fetch(5, ONE, [])]) == Reply(None, [failure])
    assert fetch(executor, 1) == [[1, 2]], "what does not depend on it is whole"


def test_fetching_poison_does_not_tell_a_new_failure_twice(executor: Executor) -> None:
    assert failure_of(executor.run(0, [call(2, [1, 2], [3], []), Fetch(3, ONE, [])])).plan == 2


def test_poison_inside_a_plan_of_several_pieces(executor: Executor) -> None:
    plan = sharded(6, "aten::neg.default", Slot(0), mesh=PAIR)
    first = failure_of(executor.run(0, [plan, call(2, [1, 2], [3], []), call(6, [3], [4], []), Barrier()]))
    assert failure_of(executor.run(2, [Fetch(4, ONE, [])])) is first


def test_a_failed_write_poisons_the_destination_and_its_views(executor: Executor) -> None:
    executor.submit(0, [put(8, [1.0, 2.0, 3.0]), call(4, [1], [3], []), call(3, [1, 8], [9], [])])
    failure = failure_of(executor.run(0, [Barrier()]))
    for handle in (1, 3, 9):
        assert executor.run(0, [Fetch(handle, ONE, [])]) == Reply(None, [failure])


def test_writing_poison_poisons_the_destination(executor: Executor) -> None:
    failure = failure_of(executor.run(0, [call(2, [1, 2], [3], []), call(3, [1, 3], [4], []), Barrier()]))
    assert executor.run(0, [Fetch(1, ONE, [])]) == Reply(None, [failure])


def test_a_huge_allocation_is_an_ordinary_failure(executor: Executor) -> None:
    plan = single(6, "aten::empty.memory_format", [Scalar(0)], inputs=0)
    failure = failure_of(executor.run(0, [plan, call(6, [], [3], [2**60]), Barrier()]))
    assert failure.operator == "aten::empty.memory_format"
    assert fetch(executor, 1) == [[1, 2]]


def test_a_plan_that_cannot_be_compiled_fails_its_calls(executor: Executor) -> None:
    plan = single(6, "aten::nonesuch.default", Slot(0))
    failure = failure_of(executor.run(0, [plan, call(6, [1], [3], []), Barrier()]))
    assert "nonesuch" in failure.message and failure.operator == "aten::nonesuch.default"
    assert executor.run(0, [Fetch(3, ONE, [])]) == Reply(None, [failure])
    executor.run(0, [single(6, "aten::neg.default", Slot(0)), call(6, [1], [3], [])])
    assert fetch(executor, 3) == [[-1, -2]], "a plan may be defined anew"


def test_values_that_were_never_stored_are_named(executor: Executor) -> None:
    assert "values [55] are not stored" in failure_of(executor.run(0, [call(1, [1, 55], [3], [])])).message


def test_put_on_a_device_that_does_not_exist_poisons_the_value(executor: Executor) -> None:
    bad = Put(9, MeshInfo("xpu", [1], [3]), [], [torch.ones(1)])
    failure = failure_of(executor.run(0, [bad]))
    assert (failure.operator, failure.device) == ("Put", "xpu:3")
    assert executor.run(0, [Fetch(9, ONE, [])]) == Reply(None, [failure])


def test_a_draw_continues_its_own_generator(executor: Executor) -> None:
    mine = torch.Generator().manual_seed(5)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    expected = [torch.rand(3, generator=mine) for _ in range(2)]
    state = torch.Generator().manual_seed(5).get_state()
    for handle, numbers in zip((3, 4), expected, strict=True):
        given = state if handle == 3 else bytes(state.numpy())
        state = executor.run(0, [Draw(5, [], [handle], [], given)]).result
        assert fetch(executor, handle) == [numbers.tolist()]
    assert torch.equal(state, mine.get_state())
    assert torch.equal(torch.get_rng_state(), before), "the default generator was left changed"


def test_a_draw_that_fails_leaves_the_default_generator_alone(executor: Executor) -> None:
    before = torch.get_rng_state()
    state = torch.Generator().manual_seed(5).get_state()
    reply = executor.run(3, [Draw(2, [1, 2], [3], [], state)])
    assert reply.result is None and failure_of(reply).sequence == 3
    assert torch.equal(torch.get_rng_state(), before)


def test_a_draw_without_a_state_uses_the_default_generator(executor: Executor) -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    assert executor.run(0, [Draw(5, [], [3], [], None)]).result is None
    assert fetch(executor, 3) == [expected.tolist()]


def test_draws_count_in_the_sequence(executor: Executor) -> None:
    batch: list[Instruction] = [call(1, [1, 2], [3], []), Draw(5, [], [4], [], None), call(2, [1, 2], [5], [])]
    assert failure_of(executor.run(10, batch)).sequence == 12


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, pytest.fail.Exception])
def test_an_interrupt_keeps_the_books(executor: Executor, kind: type[BaseException]) -> None:
    with torch.library._scoped_library("dtorch_test", "DEF") as library:
        # A name of its own: PyTorch keeps what it has found under one, whose library may have ended.
        name = f"interrupted_{kind.__name__}"
        library.define(f"{name}(Tensor x) -> Tensor")

        def interrupt(x: torch.Tensor) -> torch.Tensor:
            raise kind

        library.impl(name, interrupt, "CPU")
        stop = single(6, f"dtorch_test::{name}.default", Slot(0))
        after = single(7, "aten::neg.default", Slot(0))
        batch: list[Instruction] = [
            stop,
            call(6, [1], [3], []),
            after,
            put(8, [4.0]),
            Free([2]),
            call(7, [8], [9], []),
            Fetch(8, ONE, []),
        ]
        with pytest.raises(kind):
            executor.submit(20, batch)
    # Who pressed the keys knows: only who reads such a value hears of it again.
    assert executor.run(22, [Barrier()]).failures == []
    assert [f.sequence for f in executor.run(22, [Fetch(3, ONE, [])]).failures] == [20]
    assert 2 not in executor.store and fetch(executor, 8) == [[4]]
    executor.submit(22, [call(7, [8], [10], [])])
    assert fetch(executor, 10) == [[-4]]


@pytest.mark.parametrize("at", [0, 1])
def test_an_interrupt_after_a_run_of_calls_spares_what_ran(executor: Executor, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    executor.submit(0, [put(1, [4.0]), single(6, "aten::neg.default", Slot(0))])
    first, second = (Calls.of(*(Call(6, [h], [h + 1], []) for h in run)) for run in ((1, 2, 3), (11,)))

    def run_calls(*args: Any) -> None:
        real(*args)
        if at == 0:
            raise KeyboardInterrupt

    real = executor_module.run_calls
    monkeypatch.setattr(executor_module, "run_calls", run_calls)

    def free(handles: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(executor.store, "free", free)
    with pytest.raises(KeyboardInterrupt):
        executor.submit(0, [first, *([Free([1])] if at else []), put(11, [6.0]), second])
    monkeypatch.undo()
    assert [fetch(executor, h) for h in (2, 3, 4)] == [[[-4]], [[4]], [[-4]]]
    assert [f.sequence for f in executor.run(4, [Fetch(12, ONE, [])]).failures] == [3]
