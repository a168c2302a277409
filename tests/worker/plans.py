"""Plans written by hand, for tests of the worker."""

from __future__ import annotations

from typing import Any

from dtorch.core.program import DefinePlan, Local, MeshInfo, Slot

ONE = MeshInfo("cpu", [1], [0])


def single(number: int, operator: str, *args: Any, inputs: int = 1, outputs: int = 1, **kwargs: Any) -> DefinePlan:
    """One operator on values of one piece; slots after the inputs are its outputs."""
    made = list(range(inputs, inputs + outputs))
    step = Local(operator, list(args), kwargs, made, [])
    count = inputs + outputs
    return DefinePlan(number, operator, [ONE], [[]] * count, [0] * count, inputs, [step], made)


def sharded(number: int, operator: str, *args: Any, mesh: MeshInfo, inputs: int = 1, **kwargs: Any) -> DefinePlan:
    """One operator with one output on values that vary over mesh axis 0."""
    step = Local(operator, list(args), kwargs, [inputs], [0])
    return DefinePlan(number, operator, [mesh], [[0]] * (inputs + 1), [0] * (inputs + 1), inputs, [step], [inputs])


ADD = single(1, "aten::add.Tensor", Slot(0), Slot(1), inputs=2)
