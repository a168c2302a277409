"""Compiled plans: pieces per coordinate, in-place writes, and temporaries that do not outlive their use."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dtorch.core.errors import InternalError
from dtorch.core.program import Call, Collective, Const, DefinePlan, Local, MeshInfo, Scalar, Slot, Vary
from dtorch.worker.compile import CompiledPlan, Poisoned, written_inputs
from dtorch.worker.store import Poison, Store
from tests.worker.plans import ADD, ONE, sharded, single

PAIR = MeshInfo("cpu", [2], [0, 1])
GRID = MeshInfo("cpu", [2, 3], [10, 11, 12, 13, 14, 15])


def device_of(kind: str) -> torch.device:
    return torch.device(kind)


def run(plan: DefinePlan, *values: Any, scalars: tuple = ()) -> list[list[torch.Tensor]]:
    """Run a plan on values given as lists of pieces; returns the pieces of its outputs."""
    store = Store(enumerate(values))
    outputs = list(range(100, 100 + len(plan.outputs)))
    CompiledPlan(plan, device_of).run(store, Call(plan.plan, list(range(len(values))), outputs, list(scalars)))
    return [list(store[o]) for o in outputs]


def tensors(*numbers: float) -> list[torch.Tensor]:
    return [torch.tensor([n]) for n in numbers]


def test_one_operator_on_whole_values() -> None:
    assert run(ADD, tensors(1), tensors(2)) == [tensors(3)]


def test_scalars_come_with_the_call() -> None:
    plan = single(1, "aten::mul.Tensor", Slot(0), Scalar(1))
    assert run(plan, tensors(3), scalars=(9.0, 2.0)) == [tensors(6)]


def test_several_outputs() -> None:
    values, indices = run(single(1, "aten::topk.default", Slot(0), 1, outputs=2), [torch.tensor([1.0, 5.0, 2.0])])
    assert values[0].tolist() == [5] and indices[0].tolist() == [1]


def test_a_list_of_outputs() -> None:
    parts = run(single(1, "aten::split.Tensor", Slot(0), 2, outputs=2), [torch.arange(3)])
    assert [p[0].tolist() for p in parts] == [[0, 1], [2]]


def test_outputs_that_are_none_take_no_slot() -> None:
    a = torch.randn(2, 3)
    args = [Slot(0), Slot(0), [3], Slot(1), Slot(1), None, None, [True, False, False]]
    plan = single(1, "aten::native_layer_norm_backward.default", *args, inputs=2)
    (grads,) = run(plan, [a], [torch.ones(2, 1)])
    assert grads[0].shape == (2, 3)


def test_a_number_becomes_a_tensor() -> None:
    assert run(single(1, "aten::equal.default", Slot(0), Slot(0)), tensors(1))[0][0].item() is True


def test_no_output_at_all() -> None:
    value = torch.zeros(2)
    plan = single(1, "aten::_foreach_add_.Scalar", [Slot(0)], 1, outputs=0)
    assert run(plan, [value]) == [] and value.tolist() == [1, 1]


def test_an_output_that_is_the_written_input() -> None:
    step = Local("aten::add_.Tensor", [Slot(0), 1], {}, [1], [])
    plan = DefinePlan(1, "aten::add_.Tensor", [ONE], [[], []], [0, 0], 1, [step], [0])
    value = torch.zeros(2)
    assert run(plan, [value])[0][0] is value and value.tolist() == [1, 1]


def test_an_operator_without_inputs_runs_once_per_coordinate() -> None:
    plan = sharded(1, "aten::full.default", Vary([[1], [2]]), 7, dtype=Const("dtype", "int8"), mesh=PAIR, inputs=0)
    (pieces,) = run(plan)
    assert [p.tolist() for p in pieces] == [[7], [7, 7]] and pieces[0].dtype == torch.int8


def test_pieces_are_picked_by_projecting_the_coordinate() -> None:
    step = Local("aten::add.Tensor", [Slot(0), Slot(1)], {}, [3], [0, 1])
    more = Local("aten::add.Tensor", [Slot(3), Slot(2)], {}, [4], [0, 1])
    plan = DefinePlan(1, "x", [GRID], [[0], [1], [], [0, 1], [0, 1]], [0] * 5, 3, [step, more], [4])
    (pieces,) = run(plan, tensors(10, 20), tensors(1, 2, 3), tensors(100))
    assert [p.item() for p in pieces] == [111, 112, 113, 121, 122, 123]


def test_several_outputs_of_several_pieces() -> None:
    step = Local("aten::topk.default", [Slot(0), 1], {}, [1, 2], [0])
    plan = DefinePlan(1, "x", [PAIR], [[0]] * 3, [0] * 3, 1, [step], [1, 2])
    values, indices = run(plan, [torch.tensor([1.0, 2.0]), torch.tensor([4.0, 3.0])])
    assert values == tensors(2, 4) and [i.item() for i in indices] == [1, 0]


def test_a_collective_line_follows_its_axis() -> None:
    step = Collective("all_reduce", 0, 1, 0, 0, [], "sum")
    plan = DefinePlan(1, "x", [GRID], [[0, 1], [1]], [0, 0], 1, [step], [1])
    assert run(plan, tensors(1, 2, 3, 10, 20, 30)) == [tensors(11, 22, 33)]


def test_cuts_are_those_of_the_outer_piece() -> None:
    # dim of 5 = (3 over axis 0's first piece, 2 over its second), each cut in three by axis 1
    step = Collective("slice", 0, 1, 1, 0, [1, 2, 0, 0, 0, 2], "sum", 0, [0])
    plan = DefinePlan(1, "x", [GRID], [[0], [0, 1]], [0, 0], 1, [step], [1])
    (pieces,) = run(plan, [torch.tensor([1, 2, 3]), torch.tensor([4, 5])])
    assert [p.tolist() for p in pieces] == [[1], [2, 3], [], [], [], [4, 5]]


def test_only_the_first_part_of_a_filled_partial_has_the_value() -> None:
    step = Collective("fill", 0, 1, 1, 0, [], "sum")
    plan = DefinePlan(1, "x", [GRID], [[0], [0, 1]], [0, 0], 1, [step], [1])
    assert run(plan, tensors(7, 8)) == [tensors(7, 0, 0, 8, 0, 0)]


def test_poison_is_met_before_anything_runs() -> None:
    value = torch.zeros(1)
    steps = [Local("aten::add_.Tensor", [Slot(0), 1], {}, [2], []), Local("aten::add.Tensor", [Slot(0), Slot(1)], {}, [3], [])]
    plan = DefinePlan(1, "x", [ONE], [[]] * 4, [0] * 4, 2, steps, [3])
    with pytest.raises(Poisoned):
        run(plan, [value], Poison(None))
    assert value.item() == 0


class Alive(TorchDispatchMode):
    """Counts, at every operator, the results of earlier operators that still exist."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref] = []
        self.counts: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.counts.append(sum(r() is not None for r in self.made))
        result = func(*args, **(kwargs or {}))
        self.made.append(weakref.ref(result))
        return result


def test_temporaries_die_after_their_last_use() -> None:
    steps = [Local("aten::neg.default", [Slot(n)], {}, [n + 1], []) for n in range(5)]
    plan = CompiledPlan(DefinePlan(1, "x", [ONE], [[]] * 6, [0] * 6, 1, steps, [5]), device_of)
    store = Store({0: tensors(1)})
    plan.run(store, Call(1, [0], [1], []))
    with Alive() as alive:
        plan.run(store, Call(1, [0], [1], []))
    # before each operator: its input, and the previous call's output, which is not counted as it was not made here
    assert alive.counts == [0, 1, 1, 1, 1]


def test_a_hot_call_is_one_python_function() -> None:
    plan = CompiledPlan(ADD, device_of)
    store, call = Store({0: tensors(1), 1: tensors(2)}), Call(1, [0, 1], [2], [])
    plan.run(store, call)
    entered: list[str] = []
    sys.setprofile(lambda frame, event, arg: entered.append(event) if event in ("call", "c_call") else None)
    plan.run(store, call)
    sys.setprofile(None)
    # At most run itself, torch.add, and the setprofile that ends the count; in C it is the last alone.
    assert entered in (["call", "c_call", "c_call"], ["c_call"])


def test_written_inputs_also_through_views() -> None:
    steps = [
        Local("aten::select.int", [Slot(1), 0, 0], {}, [2], []),
        Local("aten::mul.Tensor", [Slot(0), Slot(2)], {}, [3], []),
        Local("aten::copy_.default", [Slot(2), Slot(3)], {}, [4], []),
    ]
    assert written_inputs(DefinePlan(1, "x", [ONE], [[]] * 5, [0] * 5, 2, steps, [3])) == (1,)
    assert written_inputs(ADD) == ()
    out = Local("aten::add.out", [Slot(0), Slot(0)], {"out": Slot(1)}, [2], [])
    assert written_inputs(DefinePlan(1, "x", [ONE], [[]] * 3, [0] * 3, 2, [out], [1])) == (1,)


def test_writing_a_shared_piece_once_per_coordinate_is_refused() -> None:
    step = Local("aten::add_.Tensor", [Slot(0), Slot(1)], {}, [2], [0])
    with pytest.raises(InternalError, match="more than once"):
        CompiledPlan(DefinePlan(1, "x", [PAIR], [[], [0], [0]], [0] * 3, 2, [step], [0]), device_of)
