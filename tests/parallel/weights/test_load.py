"""``load_pretrained`` of plain modules: what is read, what is computed, and what is refused with everything named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dtorch import PlacementError, RemoteError, Replicate, Shard, Tensor, UsageError, describe, init_device_mesh, load_pretrained
from dtorch.core.program import Load, Put
from dtorch.parallel.weights import load as load_module
from dtorch.testing.sessions import own_session
from dtorch.transport.inprocess import InlineTransport
from dtorch.worker.executor import Executor
from tests.parallel.test_states import MESHES, PLAN, Model, step, values


def mesh_named(name: str):
    shape, names = MESHES[name]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def on_meta() -> Model:
    """The model without data, but with its computed buffer."""
    with torch.device("meta"):
        model = Model()
    model.scale = torch.rand(4)
    return model


def saved(folder: Path, state: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """A file of a fresh model's weights, or of these."""
    state = Model().state_dict() if state is None else state
    state = {name: t.clone() for name, t in state.items() if name != "out.weight"}
    save_file(state, folder / "model.safetensors")
    return state


def load(model: nn.Module, path: Path, mesh: str = "tp=2", **options: object) -> nn.Module:
    return load_pretrained(model, path, mesh_named(mesh), PLAN if "tp" in mesh else {}, **options)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("make", [on_meta, Model])
def test_a_module_is_filled(tmp_path: Path, mesh: str, make: Callable[[], Model]) -> None:
    state, model = saved(tmp_path), make()
    scale = model.scale
    assert load(model, tmp_path, mesh) is model
    found = values(model.state_dict())
    assert all(torch.equal(found[name], expected) for name, expected in state.items())
    assert model.out.weight is model.table.weight
    assert torch.equal(model.scale.to_torch(), scale)
    assert ("Shard" in str(describe(model))) == ("tp" in mesh)


def test_it_trains_as_on_one_device(tmp_path: Path) -> None:
    plain = Model()
    saved(tmp_path, plain.state_dict())
    model = on_meta()
    model.scale = plain.scale.clone()
    load(model, tmp_path, "dp=2,tp=2")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (plain, model)]
    for _ in range(2):
        assert step(model, optimizers[1]) == pytest.approx(step(plain, optimizers[0]), rel=1e-5)


def test_several_files_and_one_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "BUNCH_NBYTES", 100)
    state = saved(tmp_path)
    names = list(state)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: state[name] for name in held}, tmp_path / file)
    (tmp_path / "model.safetensors").rename(tmp_path / "whole.safetensors")
    index = {"weight_map": {name: file for file, held in files.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for path in (tmp_path, tmp_path / "whole.safetensors", tmp_path / "model.safetensors.index.json"):
        found = values(load(on_meta(), path, "dp=2,tp=2").state_dict())
        assert all(torch.equal(found[name], expected) for name, expected in state.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    state = saved(tmp_path)
    model = load(on_meta(), tmp_path, dtype=dtype)
    for name, found in values(model.state_dict()).items():
        expected = state.get(name, state["table.weight"])
        wanted = dtype if expected.is_floating_point() else expected.dtype
        assert found.dtype == wanted and torch.equal(found, expected.to(wanted)), name
    assert model.scale.dtype == torch.float32, "what is computed keeps its dtype"
    kept = load(on_meta(), tmp_path)
    assert kept.first.weight.dtype == torch.float32
    saved(tmp_path, {name: t.half() if t.is_floating_point() else t for name, t in state.items()})
    assert load(on_meta(), tmp_path).first.weight.dtype == torch.float32, "a module given keeps its dtypes"


@pytest.mark.parametrize("mesh", MESHES)
def test_workers_read_what_they_keep_and_the_client_nothing(tmp_path: Path, mesh: str) -> None:
    """The figure: bytes of weights in instructions 0, bytes read by workers those of the distinct pieces."""
    state = saved(tmp_path)
    seen: list = []

    class Noting(InlineTransport):
        def submit(self, first: int, batch: list) -> None:
            seen.extend(batch)
            super().submit(first, batch)

        def request(self, first: int, batch: list):
            seen.extend(batch)
            return super().request(first, batch)

    with own_session(Executor(), Noting) as (client, _):
        model = load(on_meta(), tmp_path, mesh)
        client.flush()
        put = sum(t.nbytes for i in seen if isinstance(i, Put) for t in i.tensors)
        reads = [r for i in seen if isinstance(i, Load) for v in i.values for piece in v.reads for r in piece]
        assert put == model.scale.nbytes, "the one buffer that no file holds"
        assert sum(torch.Size(r.size).numel() for r in reads) == sum(t.numel() for t in state.values())


def test_faults_are_all_named_and_nothing_is_changed(tmp_path: Path) -> None:
    state = saved(tmp_path)
    state["first.weight"] = torch.ones(3, 3)
    state["more"] = state.pop("norm.bias")
    del state["second.weight"]
    saved(tmp_path, state)
    model = on_meta()
    before = dict(model.named_parameters())
    with pytest.raises(UsageError) as caught:
        load(model, tmp_path)
    assert str(caught.value).splitlines()[:4] == [
        "weights that do not fit Model",
        "  missing: second.weight; norm.bias",
        "  unexpected: more",
        "  of another shape: first.weight (3, 3), (7, 4) in the module",
    ]
    after = dict(model.named_parameters())
    assert all(after[name] is t for name, t in before.items())


def test_without_strictness_what_is_more_is_passed_over_and_what_is_missing_stays(tmp_path: Path) -> None:
    state = saved(tmp_path)
    bias = state.pop("norm.bias")
    saved(tmp_path, {**state, "more": bias})
    with pytest.raises(UsageError, match=r"missing: norm\.bias\n  rule"):
        load(on_meta(), tmp_path, strict=False)
    model = Model()
    nn.init.constant_(model.norm.bias, 7.0)
    load(model, tmp_path, strict=False)
    assert model.norm.bias.tolist() == [7.0] * 4 and isinstance(model.norm.bias, Tensor)
    assert torch.equal(model.first.weight.to_torch(), state["first.weight"])


def test_a_module_on_a_mesh_is_filled_again_on_another(tmp_path: Path) -> None:
    first, second = saved(tmp_path), None
    model = load(on_meta(), tmp_path, "tp=3")
    scale = model.scale.to_torch()
    (tmp_path / "second").mkdir()
    second = {name: t for name, t in saved(tmp_path / "second").items() if name != "norm.bias"}
    saved(tmp_path / "second", second)
    load(model, tmp_path / "second", "dp=2,tp=2", strict=False, dtype=torch.float64)
    found = values(model.state_dict())
    for name, expected in {**first, **second}.items():
        assert torch.equal(found[name], expected.double() if expected.is_floating_point() else expected), name
    assert all(t.device_mesh is mesh_named("dp=2,tp=2") for t in model.state_dict().values())
    assert torch.equal(model.scale.to_torch(), scale) and model.scale.dtype == torch.float32
    assert model.norm.bias.dtype == torch.float64


def test_tied_weights_are_read_under_any_name_and_refused_where_they_differ(tmp_path: Path) -> None:
    state = saved(tmp_path)
    table = state.pop("table.weight")
    save_file({**state, "out.weight": table}, tmp_path / "model.safetensors")
    assert torch.equal(load(on_meta(), tmp_path).table.weight.to_torch(), table)
    save_file({**state, "out.weight": table, "table.weight": table.clone()}, tmp_path / "model.safetensors")
    model = load(on_meta(), tmp_path)
    assert model.out.weight is model.table.weight
    save_file({**state, "out.weight": table, "table.weight": table + 1}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"differ in the files: table\.weight and out\.weight"):
        load(on_meta(), tmp_path)


def test_buffers_that_nothing_computes_are_missing(tmp_path: Path) -> None:
    saved(tmp_path)
    with torch.device("meta"):
        model = Model()
        model.bare = torch.ones(3)
    with pytest.raises(UsageError) as caught:
        load(model, tmp_path)
    assert "missing: scale" in str(caught.value) and "tensors without data that are no buffers: bare" in str(caught.value)


class Tables(nn.Module):
    """A buffer that ``reset_parameters`` computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("steps", torch.empty(3), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Steps 0, 1, 2; weights of ones."""
        nn.init.ones_(self.weight)
        self.steps.copy_(torch.arange(3.0))


def test_a_module_is_asked_for_the_buffers_it_computes(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(Tables(), Tables())
    save_file({"0.weight": torch.tensor([1.0, 2, 3]), "1.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    load_pretrained(model, tmp_path, mesh_named("tp=2"), {})
    assert (
        model[1].steps.tolist() == [0, 1, 2] and model[0].weight.tolist() == [1, 2, 3] and model[1].weight.tolist() == [0, 0, 0]
    )


def test_what_cannot_work_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    saved(tmp_path)
    with own_session() as (client, worker):
        for mesh, plan, error in (
            (init_device_mesh("cpu", 9, mesh_dim_names=("pp",)), {}, UsageError),
            (init_device_mesh("cpu", 2, mesh_dim_names=("xx",)), {}, UsageError),
            (mesh_named("tp=2"), {"first": {"tp": Shard(5)}}, PlacementError),
        ):
            with pytest.raises(error):
                load_pretrained(on_meta(), tmp_path, mesh, plan)
        client.flush()
        assert not worker.store
    with pytest.raises(UsageError, match=r"class Linear(.|\n)*torch\.device"):
        load_pretrained(nn.Linear, tmp_path, mesh_named("tp=2"))
    for dtype in ("auto", torch.int64):
        with pytest.raises(UsageError, match=r"(?s)dtype=.*floating-point torch\.dtype"):
            load_pretrained(on_meta(), tmp_path, mesh_named("tp=2"), PLAN, dtype=dtype)
    with pytest.raises(UsageError, match=r"(?s)'Linear' for a module.*AutoModelForCausalLM"):
        load_pretrained("Linear", tmp_path, mesh_named("tp=2"))


def test_a_file_that_goes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    model = on_meta()
    lay_out = load_module.lay_out

    def late(*args: object) -> object:
        (tmp_path / "model.safetensors").unlink()
        return lay_out(*args)

    monkeypatch.setattr(load_module, "lay_out", late)
    with pytest.raises(RemoteError, match="Load failed"):
        load(model, tmp_path)
    assert model.first.weight.is_meta


def test_placements_of_every_kind(tmp_path: Path) -> None:
    weight = torch.randn(7, 5)
    save_file({"weight": weight}, tmp_path / "model.safetensors")
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
    for choice in (
        [Shard(0), Shard(0)],
        [Shard(1, (0, 5)), Shard(0, (7, 0, 0))],
        [Replicate(), Shard(1)],
        [Shard(1), Replicate()],
    ):
        with torch.device("meta"):
            model = nn.Linear(5, 7, bias=False)
        load_pretrained(model, tmp_path, mesh, {"weight": choice})
        assert torch.equal(model.weight.to_torch(), weight) and model.weight.placements == tuple(choice)


@pytest.mark.parametrize(("shown", "lines"), [(True, True), (False, False), (None, False)])
def test_progress(tmp_path: Path, shown: bool | None, lines: bool, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path)
    load(on_meta(), tmp_path, progress=shown)
    captured = capsys.readouterr()
    assert ("loading weights" in captured.err) == lines and not captured.out
