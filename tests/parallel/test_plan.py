"""Reading plans: which row wins, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dtorch import Partial, PlacementError, Replicate, Shard, UsageError, init_device_mesh
from dtorch.parallel import Plan, plan_of
from dtorch.parallel.sources import read_plan
from dtorch.parallel.writing import placement_named
from tests.models.zoo import bert, llama, on_mesh

MESH = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def pair() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def test_a_model_carries_its_plan() -> None:
    plan = read_plan(llama(), MESH, None)
    assert plan.source == "the model's own plan"
    assert plan.choice("model.layers.11.self_attn.q_proj", "weight") == "colwise"
    assert plan.choice("model.norm", "weight") is None


def test_a_model_without_one_has_an_inferred_plan() -> None:
    plan = read_plan(bert(), MESH, None)
    assert plan.source == "a plan inferred from its structure"
    assert plan.choice("bert.encoder.layer.1.output.dense", "weight") == "rowwise"
    assert read_plan(nn.Linear(4, 4), MESH, None).rows == ()


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
        ({"0": {"inputs": "colwise"}}, UsageError, "(?s)'colwise'.*inputs are placements"),
        ({"0": {"outputs": {"model": Shard(1)}}}, UsageError, "axis 'model'"),
        ({"0": {"weights": "colwise", "output": {"tp": Shard(1)}}}, UsageError, "(?s)'output'.*weights, inputs, outputs"),
        ({0: "colwise"}, UsageError, "(?s)0.*a dict from patterns"),
        (["colwise"], UsageError, "(?s)colwise.*a dict from patterns"),
        ("colwise", UsageError, "(?s)colwise.*a dict from patterns"),
        (plan_of(pair()).override({"2": "colwise"}), UsageError, "pattern '2'"),
        (Plan.of({"0.wieght": "colwise"}), UsageError, "pattern '0.wieght'"),
    ],
)
def test_slips_are_refused(row: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_plan(pair(), MESH, row)


FULL = Plan.of(
    {
        "0": "colwise",
        "0.bias": {"dp": Replicate(), "tp": Shard(0, (1, 3))},
        "1": {"weights": "rowwise", "inputs": {"tp": Shard(-1)}, "outputs": {"tp": Replicate()}},
        "*": {"outputs": {"dp": Partial("max")}},
    }
)


def test_each_part_is_that_of_the_last_row_that_says_it() -> None:
    assert FULL.choice("1", "weight") == "rowwise"
    assert FULL.inputs("1") == {"tp": Shard(-1)} and FULL.inputs("0") == {}
    assert FULL.outputs("1") == {"dp": Partial("max")}


def test_a_plan_survives_json() -> None:
    assert Plan.from_json(FULL.to_json()) == FULL
    for model in (llama(), bert()):
        assert Plan.from_json(plan_of(model, sp=True).to_json()) == plan_of(model, sp=True)


@pytest.mark.parametrize("text", ["Shard", "Shard(0", "Split(0)", "Shard(print)", "Shard(0)(1)", "Shard(1, 2, 3)"])
def test_other_text_is_no_placement(text: str) -> None:
    with pytest.raises(UsageError, match="is written as one of"):
        placement_named(text)


@pytest.mark.parametrize("text", ["{", "[]", "3", "{}", '{"source": "x", "rows": [{"weights": "colwise"}]}', '{"rows": []}'])
def test_other_text_is_no_plan(text: str) -> None:
    with pytest.raises(UsageError, match=r"(?s)text that is no plan.*Plan.from_json"):
        Plan.from_json(text)


def test_a_model_s_own_plan_may_name_what_it_lacks() -> None:
    model = llama()
    model._tp_plan = {**model._tp_plan, "model.layers.*.bogus": "colwise"}
    for plan in (plan_of(model), plan_of(model, sp=True), plan_of(model).override({"lm_head": "replicate"})):
        assert read_plan(model, MESH, plan).choice("model.layers.0.bogus", "weight") == "colwise"


def test_a_plan_is_printed_as_a_table() -> None:
    lines = str(FULL).splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "the plan given",
        "name weights inputs outputs",
        "0 colwise",
        "0.bias dp Replicate(), tp Shard(0, sizes=(1, 3))",
        "1 rowwise tp Shard(-1) tp Replicate()",
        "* dp Partial('max')",
    ]
    assert lines[1].index("outputs") == lines[-1].index("dp Partial")


def test_any_part_can_be_overridden() -> None:
    plan = FULL.override({"0": "rowwise", "1": {"outputs": {"tp": Shard(1)}}, "1.bias": "replicate"})
    assert plan.source == "the plan given, changed by hand"
    assert plan.choice("0", "weight") == "rowwise"
    assert plan.choice("1", "weight") == "rowwise" and plan.inputs("1") == {"tp": Shard(-1)}
    assert plan.outputs("1") == {"tp": Shard(1)}
    assert plan.choice("1", "bias") == "replicate"
    assert [row.pattern for row in plan.rows] == ["0.bias", "1", "*", "0", "1", "1.bias"]
    assert FULL.override(plan).choice("1", "bias") == "replicate"


def test_the_difference_of_two_plans() -> None:
    changed = FULL.override({"0": "rowwise", "2": "colwise"})
    diff = FULL.diff(changed)
    assert [row.pattern for row in diff.added] == ["2"] and diff.removed == ()
    assert [(a.weights, b.weights) for a, b in diff.changed] == [("colwise", "rowwise")]
    assert str(diff).splitlines() == ["+  2  colwise", "-  0  colwise", "+  0  rowwise"]
    assert changed.diff(FULL).removed == diff.added
    assert not FULL.diff(FULL) and str(FULL.diff(FULL)) == "no difference"


def test_a_plan_is_taken_whole() -> None:
    model = on_mesh(llama(), MESH, plan_of(llama()).override({"model.layers.0.mlp.*": "replicate"}))
    first, second = model.model.layers
    assert first.mlp.up_proj.weight.placements == (Replicate(), Replicate())
    assert second.mlp.up_proj.weight.placements == (Replicate(), Shard(0))
    assert first.self_attn.o_proj.weight.placements[1] == Shard(1, (24, 12))


def test_inputs_and_outputs_lie_as_a_row_says() -> None:
    seen = {}
    rows = {"0": {"weights": "colwise", "outputs": {"tp": Replicate()}}, "1": {"inputs": {"tp": Shard(1), "dp": Replicate()}}}
    model = on_mesh(pair(), MESH, rows)
    model[1].register_forward_pre_hook(lambda module, args: seen.update(given=args[0]))
    model[0].register_forward_hook(lambda module, args, out: seen.update(made=out))
    x = torch.randn(4, 4)
    out = model(x)
    assert seen["made"].placements == (Shard(0), Replicate())
    assert seen["given"].placements == (Replicate(), Shard(1))
    again = nn.Sequential(*(nn.utils.skip_init(nn.Linear, 4, 4) for _ in range(2)))
    again.load_state_dict({name: t.to_torch() for name, t in model.state_dict().items()})
    torch.testing.assert_close(out.detach().to_torch(), again(x).detach())
