"""Arguments of a local operator, from the wire to the call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtorch.core.program import Const, Local, Scalar, Slot, Vary
from dtorch.worker.template import Template, chosen, constant, slots_of

CPU = torch.device("cpu")

CONSTANTS = [
    (Const("dtype", "bfloat16"), torch.bfloat16),
    (Const("torch", "channels_last"), torch.channels_last),
    (Const("torch", "strided"), torch.strided),
    (Const("device", "cuda"), torch.device("cuda", 0)),
    (Const("complex", "(1+2j)"), 1 + 2j),
    ([1, [Const("dtype", "int8")]], [1, [torch.int8]]),
    (float("inf"), float("inf")),
    (None, None),
]


@pytest.mark.parametrize(("wire", "expected"), CONSTANTS)
def test_constants(wire: Any, expected: Any) -> None:
    assert constant(wire, lambda kind: torch.device(kind, 0)) == expected


def run(step: Local, *pieces: torch.Tensor, scalars: tuple = (), coordinate: int = 0) -> Any:
    template = Template(step, lambda slot: f"pieces[{slot}]", lambda kind: CPU, (0, 1))
    return template.function(f"def run(pieces, s, c): return {template.text}", "<test>")(pieces, scalars, coordinate)


def local(operator: str, *args: Any, **kwargs: Any) -> Local:
    return Local(operator, list(args), kwargs, [9], [])


def test_slots_scalars_and_constants_mix() -> None:
    a, b = torch.randn(3), torch.randn(3)
    step = local("aten::add.Tensor", Slot(0), Slot(1), alpha=Scalar(0))
    assert torch.equal(run(step, a, b, scalars=(2,)), a + 2 * b)


def test_slots_inside_lists() -> None:
    a, b = torch.randn(3), torch.randn(3)
    assert torch.equal(run(local("aten::cat.default", [Slot(1), Slot(0), Slot(1)], 0), a, b), torch.cat([b, a, b]))
    index = torch.tensor([1, 0])
    rows = torch.randn(2, 2)
    assert torch.equal(run(local("aten::index.Tensor", Slot(0), [None, Slot(1)]), rows, index), rows[:, index])


def test_arguments_that_vary_are_picked_by_coordinate() -> None:
    step = local("aten::narrow_copy.default", Slot(0), 0, Vary([0, 2]), Vary([2, 1]))
    assert run(step, torch.arange(3), coordinate=1).tolist() == [2]


def test_arguments_that_vary_are_those_of_the_coordinates_that_are_held() -> None:
    step = local("aten::add.Scalar", Slot(0), Vary([10, 20, 30, 40]))
    template = Template(step, lambda slot: f"pieces[{slot}]", lambda kind: CPU, (1, 3))
    call = template.function(f"def run(pieces, s, c): return {template.text}", "<test>")
    assert [call((torch.zeros(()),), (), c).item() for c in range(2)] == [20, 40]


def test_a_parameter_named_like_a_keyword() -> None:
    step = Local("aten::random.from", [Slot(0)], {"from": 5, "to": 6}, [9], [])
    assert run(step, torch.zeros(2)).tolist() == [5, 5]


def test_text_and_infinities_survive_as_constants() -> None:
    assert run(local("aten::full.default", [2], float("-inf"))).tolist() == [float("-inf")] * 2
    a = torch.randn(3)
    expected = torch.nn.functional.gelu(a, approximate="tanh")
    assert torch.equal(run(local("aten::gelu.default", Slot(0), approximate="tanh"), a), expected)


def test_finding_slots_and_choosing_a_coordinate() -> None:
    tree = [Slot(3), [Slot(1), {"x": Slot(3)}], 2, {"y": [Vary([1, 2])]}]
    assert slots_of(tree) == [3, 1, 3]
    assert chosen(tree, 1) == [Slot(3), [Slot(1), {"x": Slot(3)}], 2, {"y": [2]}]
