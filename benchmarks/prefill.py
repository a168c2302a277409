"""SmolLM2 reading a prompt: large operators, where the work itself decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

import dtorch
from dtorch import DeviceMesh
from dtorch.tensor.watch import Report

from . import smollm2
from .figure import Figure
from .setting import Setting
from .timing import Pairs, paired

TOKENS, LONG = 256, 512
TOLERANCE = 1e-4
"""Of the largest logit: sums that are split over devices add up in another order."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Prompts of so many tokens on a mesh, and what the figure must reach."""

    name: str
    where: str
    mesh: DeviceMesh
    limit: float
    samples: int = 1
    tokens: int = TOKENS
    peer: str = "-"


def figures(setting: Setting) -> Iterator[Figure]:
    """Total time of a forward to the logits ``(samples, tokens, vocabulary)``, to eager."""
    for row in _rows(setting):
        yield _figure(setting, row)


def _rows(setting: Setting) -> Iterator[Row]:
    published = "0.98x (DTorch, published, on a GPU)"
    yield Row(name="prefill.one_device", where="one-device mesh, total time", mesh=setting.mesh(), limit=1.05, peer=published)
    yield _simulated(setting, {"tp": 2, "pp": 2}, 1.5, TOKENS)
    for axes in ("dp", "tp", "pp"), ("tp", "ring_cp", "ulysses_cp"):
        yield _simulated(setting, dict.fromkeys(axes, 2), 1.6, LONG)


def _simulated(setting: Setting, axes: Mapping[str, int], limit: float, tokens: int) -> Row:
    mesh = setting.mesh(tuple(axes.values()), tuple(axes))
    name = "prefill." + "_".join(f"{axis}{size}" for axis, size in axes.items())
    where = " x ".join(f"{axis}={size}" for axis, size in axes.items()) + " simulated on the same cores"
    return Row(name=name, where=where, mesh=mesh, limit=limit, samples=axes.get("dp", 1), tokens=tokens)


def _figure(setting: Setting, row: Row) -> Figure:
    ids = smollm2.prompt(row.tokens, setting.device, row.samples)
    plain, ours = prefill(smollm2.plain(setting.device), ids), prefill(smollm2.distributed(row.mesh), ids)
    with torch.inference_mode():
        equality = compare(plain(), ours().to_torch(), exact=row.mesh.size() == 1)
        with dtorch.explain() as report:
            ours()
        total = paired(setting.plain(plain), setting.ours(ours), setting.times(7, 1))
    no_grad = _no_grad(setting, plain, ours)
    return Figure(
        name=row.name,
        title=f"SmolLM2 prefill of {row.samples} x {row.tokens} tokens, {row.where}, to eager",
        measured=total.ratio,
        limit=row.limit,
        spread=total.spread,
        peer=row.peer,
        notes=(
            f"{total.times(1e-3, 'ms')} under inference_mode; processor time {total.cpu_ratio:.2f}x",
            f"under no_grad {no_grad.ratio:.2f}x, {no_grad.times(1e-3, 'ms')}",
            f"{equality}; {_collectives(report)}; operators without a rule: {sorted(report.replicated) or 'none'}",
        ),
    )


def prefill(model: torch.nn.Module, ids: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The forward; its logits."""
    return lambda: model(ids).logits


def compare(expected: torch.Tensor, actual: torch.Tensor, exact: bool) -> str:
    """Says how equal the logits are; fails where they are not."""
    if torch.equal(expected, actual):
        return "logits bit for bit equal"
    error = ((expected - actual).abs().max() / expected.abs().max()).item()
    assert not exact and error < TOLERANCE, f"the logits differ by {error:.1e} of the largest"
    return f"logits equal to {error:.0e} of the largest"


def _collectives(report: Report) -> str:
    kinds = Counter(event.comm.kind for event in report.events)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "no collective"


@torch.no_grad()
def _no_grad(setting: Setting, plain: Callable[[], torch.Tensor], ours: Callable[[], torch.Tensor]) -> Pairs:
    ours()
    return paired(setting.plain(plain), setting.ours(ours), setting.times(3, 1))
