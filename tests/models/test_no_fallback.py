"""What transformers, diffusion models, networks of convolutions and optimizers do never runs replicated on split tensors.

Every program is run on plain PyTorch too, and must give the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, update_bn
from transformers import ViTConfig, ViTForImageClassification

import dtorch
from dtorch import DeviceMesh, Replicate, Shard, explain, init_device_mesh
from dtorch.core.placements import Placement
from tests.models.networks import DiffusionTransformer, ResidualNetwork, UNetwork
from tests.models.zoo import MODELS, PAD, VOCABULARY, on_mesh, without_dropout

R = Replicate()
LINE = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
GRID = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def last(p: Tensor) -> Placement:
    """Split along the last dim."""
    return Shard(p.ndim - 1) if p.ndim else R


def first(p: Tensor) -> Placement:
    """Split along the first dim."""
    return Shard(0) if p.ndim else R


Layout = tuple[DeviceMesh, list[Placement], Callable[[Tensor], list[Placement]]]
LAYOUTS: dict[str, Layout] = {
    "batch": (LINE, [Shard(0)], lambda p: [R]),
    "batch and parameters": (LINE, [Shard(0)], lambda p: [first(p)]),
    "features": (LINE, [R], lambda p: [last(p)]),
    "batch, features": (GRID, [Shard(0), R], lambda p: [R, first(p)]),
    "batch and parameters, features": (GRID, [Shard(0), R], lambda p: [first(p), last(p)]),
}


@contextmanager
def all_have_rules() -> Iterator[None]:
    """Assert that inside no operator runs replicated, also none whose result's shape depends on data."""
    with explain() as report:
        yield
    replicated = {name for name, way in report.ways if way == "replicated"} | set(report.replicated)
    assert not replicated, f"ran replicated: {replicated}"


def placed(t: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> dtorch.Tensor:
    return dtorch.Tensor(t.detach(), device_mesh=mesh, placements=placements)


def spread(module: nn.Module, layout: Layout) -> nn.Module:
    """A copy of a module with its parameters split as a layout says, and its buffers replicated."""
    mesh, _, how = layout
    module = copy.deepcopy(module)
    for part in module.modules():
        for name, p in list(part._parameters.items()):
            if p is not None:
                setattr(part, name, nn.Parameter(placed(p, mesh, how(p))))
        for name, b in part._buffers.items():
            part._buffers[name] = None if b is None else placed(b, mesh, [R] * mesh.ndim)
    return module


def assert_same(ours: Any, plain: Any, rtol: float = 2e-4, atol: float = 2e-5) -> None:
    for number, (a, b) in enumerate(zip(ours, plain, strict=True)):
        a = a.detach().to_torch() if isinstance(a, dtorch.Tensor) else a.detach()
        torch.testing.assert_close(a, b.detach(), rtol=rtol, atol=atol, msg=lambda text, n=number: f"number {n}: {text}")


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Tensor]]]] = {
    "diffusion transformer": (
        DiffusionTransformer,
        lambda: [torch.randn(5, 3, 8, 8), torch.tensor([1, 50, 100, 500, 900]), torch.arange(5)],
    ),
    "residual": (ResidualNetwork, lambda: [torch.randn(5, 3, 32, 32)]),
    "u-shaped": (UNetwork, lambda: [torch.randn(5, 3, 8, 8), torch.tensor([1, 50, 100, 500, 900])]),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name: str, layout: Layout) -> None:
    make, draw = NETWORKS[name]
    plain, inputs = make(), draw()
    ours = spread(plain, layout)

    def run(model: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
        torch.manual_seed(1)
        optimizer, seen = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        for _ in range(2):
            out = model(*inputs)
            loss = F.cross_entropy(out, torch.arange(5)) if out.ndim == 2 else out.square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            seen += [out, loss, *[p.grad.clone() for p in model.parameters()]]
            optimizer.step()
            optimizer.zero_grad()
        return [*seen, model.eval()(*inputs)]

    with all_have_rules():
        result = run(ours, [placed(t, layout[0], layout[1]) for t in inputs])
    assert_same(result, run(plain, inputs), rtol=1e-3, atol=1e-4)


MESHES = {"dp=3": ((3,), ("dp",)), "tp=3": ((3,), ("tp",)), "dp=2,tp=2": ((2, 2), ("dp", "tp"))}


def mesh_named(name: str) -> DeviceMesh:
    shape, names = MESHES[name]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def sentences() -> dict[str, Tensor]:
    """Five sequences of seven tokens, two padded on the left."""
    ids = torch.randint(1, VOCABULARY, (5, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :2] = mask[3, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


def images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(5, 3, 16, 16), "labels": torch.tensor([1, 2, 3, 4, 5])}


def vit() -> nn.Module:
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 50}
    return ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, num_labels=7, **sizes))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", [*MODELS, "vit"])
def test_transformers(name: str, mesh: str) -> None:
    model = without_dropout(vit() if name == "vit" else MODELS[name]())
    inputs = images() if name == "vit" else {**sentences(), "labels": sentences()["input_ids"]}
    if name == "mixtral":
        inputs["output_router_logits"] = True
    ours = on_mesh(model, mesh_named(mesh))

    def run(model: nn.Module) -> list[Tensor]:
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        for _ in range(2):
            losses.append(model(**inputs).loss)
            losses[-1].backward()
            losses.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
        return losses

    with all_have_rules():
        result = run(ours)
    assert_same(result, run(model))


GENERATION: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.8},
    "typical": {"do_sample": True, "typical_p": 0.9, "repetition_penalty": 1.2, "no_repeat_ngram_size": 2},
    "cut off": {"do_sample": True, "min_p": 0.05, "epsilon_cutoff": 1e-3, "eta_cutoff": 1e-3},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampled beams": {"do_sample": True, "num_beams": 3},
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    ("name", "how"),
    [*[("llama", how) for how in GENERATION], *[(m, h) for m in ("gpt2", "mixtral") for h in ("greedy", "sampled")]],
)
def test_generation(name: str, how: str, mesh: str) -> None:
    model = MODELS[name]()
    ours = on_mesh(model, mesh_named(mesh))

    def run(model: nn.Module) -> Tensor:
        torch.manual_seed(5)
        return model.generate(**sentences(), max_new_tokens=4, pad_token_id=PAD, **GENERATION[how])

    with all_have_rules():
        result = run(ours)
    assert torch.equal(result.to_torch() if isinstance(result, dtorch.Tensor) else result, run(model))


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyOptions"), reason="a newer PyTorch has it")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_loss_of_hidden_states_in_chunks(layout: Layout, reduction: str) -> None:
    hidden, weight, target = torch.randn(9, 6), torch.randn(11, 6), torch.arange(9)

    def run(x: Tensor, w: Tensor, t: Tensor) -> list[Tensor]:
        x.requires_grad_(), w.requires_grad_()
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=2)
        loss = F.linear_cross_entropy(x, w, t, reduction=reduction, options=options)
        loss.sum().backward()
        return [loss, x.grad, w.grad]

    mesh, batch, how = layout
    with all_have_rules():
        result = run(placed(hidden, mesh, batch), placed(weight, mesh, how(weight)), placed(target, mesh, batch))
    assert_same(result, run(hidden, weight, target))


class Small(nn.Module):
    """A network with a parameter of each shape that optimizers tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mid, self.norm = nn.Embedding(6, 5), nn.Linear(5, 7), nn.LayerNorm(7)
        self.scale, self.out = nn.Parameter(torch.tensor(0.5)), nn.Linear(7, 4, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """(n,) -> (n, 4)."""
        return self.out(torch.tanh(self.norm(self.mid(self.embed(ids)))) * self.scale)


IDS, CLASSES = torch.tensor([0, 3, 5, 1, 2]), torch.tensor([0, 1, 2, 3, 0])
Loop = Callable[[nn.Module, Tensor], list[Tensor]]


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    loss = F.cross_entropy(model(ids), CLASSES)
    loss.backward()
    return loss


def check_loop(loop: Loop, layout: Layout, exact: bool = False) -> None:
    """The same results and parameters after a loop of training."""
    torch.manual_seed(0)
    plain = Small().double() if exact else Small()
    ours = spread(plain, layout)
    with all_have_rules():
        result = loop(ours, placed(IDS, layout[0], layout[1]))
    assert_same(result, loop(plain, IDS))
    assert_same(ours.parameters(), plain.parameters())


def stepping(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], steps: int = 3) -> Loop:
    """A loop with an optimizer."""

    def loop(model: nn.Module, ids: Tensor) -> list[Tensor]:
        optimizer, losses = make(list(model.parameters())), []

        def closure() -> Tensor:
            optimizer.zero_grad()
            return loss_of(model, ids)

        for _ in range(steps):
            losses.append(optimizer.step(closure))
        return losses

    return loop


def matrices(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    return [p for p in parameters if p.ndim == 2]


OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Adadelta": ("Adadelta", {}),
    "Adafactor": ("Adafactor", {"lr": 0.1}),
    "Adagrad": ("Adagrad", {"lr_decay": 0.1}),
    "Adam": ("Adam", {"lr": 0.01}),
    "Adam with a rate in a tensor": ("Adam", {"lr": torch.tensor(0.01)}),
    "AMSGrad": ("AdamW", {"amsgrad": True}),
    "AdamW": ("AdamW", {"weight_decay": 0.1, "maximize": True}),
    "Adamax": ("Adamax", {}),
    "ASGD": ("ASGD", {}),
    "NAdam": ("NAdam", {}),
    "RAdam": ("RAdam", {}),
    "RMSprop": ("RMSprop", {"centered": True, "momentum": 0.9}),
    "Rprop": ("Rprop", {}),
    "SGD": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}
FUSED = ("Adagrad", "Adam", "AMSGrad", "AdamW", "SGD")


@pytest.mark.parametrize("layout", ["batch and parameters", "batch and parameters, features"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, layout: str) -> None:
    kind, options = OPTIMIZERS[name]
    forms: list[dict[str, Any]] = [{"foreach": True}, {"foreach": False}, *([{"fused": True}] if name in FUSED else [])]
    if isinstance(options.get("lr"), Tensor):
        forms = forms[1:]
    for form in forms:
        own = {k: v.clone() if isinstance(v, Tensor) else v for k, v in options.items()}
        check_loop(stepping(lambda p, form=form, own=own: getattr(torch.optim, kind)(p, **own, **form)), LAYOUTS[layout])


@pytest.mark.parametrize("layout", ["batch and parameters", "batch and parameters, features"])
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs(search: str | None, layout: str) -> None:
    make = stepping(lambda p: torch.optim.LBFGS(p, max_iter=4, history_size=3, line_search_fn=search))
    # It divides by differences, so rounding grows.
    check_loop(make, LAYOUTS[layout], exact=True)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="a newer PyTorch has it")
def test_muon() -> None:
    layout = LAYOUTS["batch and parameters, features"]
    plain = Small()
    ours = spread(plain, layout)
    loop = stepping(lambda p: torch.optim.Muon(matrices(p), lr=0.01), steps=1)
    with all_have_rules():
        loop(ours, placed(IDS, layout[0], layout[1]))
    loop(plain, IDS)
    # It computes in bfloat16, where split sums round otherwise.
    assert_same(ours.parameters(), plain.parameters(), rtol=0.05, atol=2e-3)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 1),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 2]),
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 3),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 10),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [1]),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SWALR": lambda o: SWALR(o, 0.05),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name: str) -> None:
    def loop(model: nn.Module, ids: Tensor) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler, losses = SCHEDULERS[name](optimizer), []
        for _ in range(3):
            optimizer.zero_grad()
            losses.append(loss_of(model, ids))
            optimizer.step()
            scheduler.step(*([losses[-1].detach()] if name == "ReduceLROnPlateau" else []))
        return losses

    check_loop(loop, LAYOUTS["batch and parameters, features"])


@pytest.mark.parametrize("layout", ["batch and parameters", "batch and parameters, features"])
@pytest.mark.parametrize("options", [{}, {"norm_type": 1.0}, {"norm_type": float("inf")}, {"foreach": False}], ids=str)
def test_clipping(options: dict[str, Any], layout: str) -> None:
    def loop(model: nn.Module, ids: Tensor) -> list[Tensor]:
        loss = loss_of(model, ids)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True, **options)
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        vector = nn.utils.parameters_to_vector([p.grad for p in model.parameters()])
        return [loss, norm, vector]

    check_loop(loop, LAYOUTS[layout])


def test_averages_of_weights() -> None:
    def loop(model: nn.Module, ids: Tensor) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        averages = [AveragedModel(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))]
        averages.append(AveragedModel(model, avg_fn=get_ema_avg_fn(0.9), use_buffers=True))
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model, ids)
            optimizer.step()
            for average in averages:
                average.update_parameters(model)
        update_bn([ids], averages[0])
        return [t for average in averages for t in (average(ids), *average.parameters())]

    for layout in LAYOUTS.values():
        check_loop(loop, layout)


@pytest.mark.parametrize("fused", [False, True])
def test_scaled_losses(fused: bool) -> None:
    def loop(model: nn.Module, ids: Tensor) -> list[Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(ids), CLASSES)).backward()
            scaler.step(optimizer)
            scaler.update()
        return [torch.tensor(scaler.get_scale())]

    for layout in LAYOUTS.values():
        check_loop(loop, layout)


INITIALISERS: dict[str, Callable[[Tensor], Tensor]] = {
    "uniform": nn.init.uniform_,
    "normal": nn.init.normal_,
    "truncated normal": nn.init.trunc_normal_,
    "Xavier, uniform": nn.init.xavier_uniform_,
    "Xavier, normal": nn.init.xavier_normal_,
    "Kaiming, uniform": nn.init.kaiming_uniform_,
    "Kaiming, normal": nn.init.kaiming_normal_,
    "orthogonal": nn.init.orthogonal_,
    "sparse": lambda t: nn.init.sparse_(t, 0.3),
    "identity": nn.init.eye_,
    "constant": lambda t: nn.init.constant_(t, 2.0),
}


@pytest.mark.parametrize("name", INITIALISERS)
def test_initialisers(name: str) -> None:
    torch.manual_seed(3)
    expected = INITIALISERS[name](torch.empty(6, 5))
    for mesh, _, how in LAYOUTS.values():
        torch.manual_seed(3)
        with all_have_rules():
            ours = INITIALISERS[name](placed(torch.zeros(6, 5), mesh, how(expected)))
        torch.testing.assert_close(ours.to_torch(), expected)


def test_the_check_sees_what_has_no_rule() -> None:
    with pytest.raises(AssertionError, match="nonzero"), all_have_rules():
        placed(torch.ones(6), LINE, [Shard(0)]).nonzero()
