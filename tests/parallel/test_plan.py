"""Reading plans: which row wins, and what is refused."""

from __future__ import annotations

import pytest
from torch import nn

from dtorch import PlacementError, Replicate, Shard, UsageError, init_device_mesh
from dtorch.parallel.plan import read_plan
from tests.models.zoo import bert, llama

MESH = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def pair() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def test_a_model_carries_its_plan() -> None:
    plan = read_plan(llama(), MESH, None)
    assert plan.source == "the model's own plan"
    assert plan.choice("model.layers.11.self_attn.q_proj", "weight") == "colwise"
    assert plan.choice("model.norm", "weight") is None


def test_some_kinds_have_a_plan_here() -> None:
    assert read_plan(bert(), MESH, None).choice("bert.encoder.layer.1.output.dense", "weight") == "rowwise"


def test_without_a_plan_nothing_is_named() -> None:
    assert read_plan(pair(), MESH, None).choice("0", "weight") is None


def test_the_name_of_a_parameter_beats_its_module_and_later_rows_win() -> None:
    plan = read_plan(pair(), MESH, {"0.weight": "rowwise", "0": "colwise", "*": "replicate", "1": "colwise"})
    assert plan.choice("1", "weight") == "replicate", "a pattern for everything names parameters too"
    plan = read_plan(pair(), MESH, {"0.weight": "rowwise", "0": "colwise", "1": "colwise", "1*": "rowwise"})
    assert plan.choice("0", "weight") == "rowwise"
    assert plan.choice("0", "bias") == "colwise"
    assert plan.choice("1", "bias") == "rowwise"


def test_placements_by_name_and_in_order() -> None:
    plan = read_plan(pair(), MESH, {"0.weight": {"tp": Shard(0)}, "1.weight": [Replicate(), Shard(1)]})
    assert plan.choice("0", "weight") == {"tp": Shard(0)}
    assert plan.choice("1", "weight") == {"dp": Replicate(), "tp": Shard(1)}


@pytest.mark.parametrize(
    ("row", "error", "message"),
    [
        ({"0": "colum"}, UsageError, r"(?s)style 'colum'.*row '0'"),
        ({"2": "colwise"}, UsageError, "pattern '2'"),
        ({"0": {"model": Shard(0)}}, UsageError, "axis 'model'"),
        ({"0": {"tp": 0}}, UsageError, "placement 0"),
        ({"0": 3}, UsageError, "(?s)3.*a row says"),
        ({"0": [Shard(0)]}, PlacementError, "one placement per mesh axis"),
    ],
)
def test_slips_are_refused(row: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_plan(pair(), MESH, row)
