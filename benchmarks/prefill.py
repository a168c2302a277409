"""SmolLM2 reading a prompt of 256 tokens: large operators, where the work itself decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

import dtorch
from dtorch import DeviceMesh

from . import smollm2
from .figure import Figure
from .setting import Setting
from .timing import Pairs, paired

TOKENS = 256
TOLERANCE = 1e-4
"""Of the largest logit: sums that are split over devices add up in another order."""


def figures(setting: Setting) -> Iterator[Figure]:
    """Total time of a forward to the logits ``(1, 256, vocabulary)``, to eager."""
    for name, title, mesh, limit, peer in _rows(setting):
        yield _figure(setting, name, title, mesh, limit, peer)


def _rows(setting: Setting) -> Iterator[tuple[str, str, DeviceMesh, float, str]]:
    on = f"SmolLM2 prefill of {TOKENS} tokens"
    yield (
        "prefill.one_device",
        f"{on}, one-device mesh, total time to eager",
        setting.mesh(),
        1.05,
        "0.98x (DTorch, published, on a GPU)",
    )
    grid = setting.mesh((2, 2), ("tp", "pp"))
    yield "prefill.tp2_pp2", f"{on}, tp=2 x pp=2 simulated on the same cores, to eager", grid, 1.5, "-"


def _figure(setting: Setting, name: str, title: str, mesh: DeviceMesh, limit: float, peer: str) -> Figure:
    ids = smollm2.prompt(TOKENS, setting.device)
    plain, ours = prefill(smollm2.plain(setting.device), ids), prefill(smollm2.distributed(mesh), ids)
    with torch.inference_mode():
        equality = compare(plain(), ours().to_torch(), exact=mesh.size() == 1)
        with dtorch.explain() as report:
            ours()
        total = paired(setting.plain(plain), setting.ours(ours), setting.times(7, 1))
    no_grad = _no_grad(setting, plain, ours)
    return Figure(
        name=name,
        title=title,
        measured=total.ratio,
        limit=limit,
        spread=total.spread,
        peer=peer,
        notes=(
            f"{total.times(1e-3, 'ms')} under inference_mode; processor time {total.cpu_ratio:.2f}x",
            f"under no_grad {no_grad.ratio:.2f}x, {no_grad.times(1e-3, 'ms')}",
            f"{equality}; {len(report.events)} collectives; operators without a rule: {sorted(report.replicated) or 'none'}",
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


@torch.no_grad()
def _no_grad(setting: Setting, plain: Callable[[], torch.Tensor], ours: Callable[[], torch.Tensor]) -> Pairs:
    ours()
    return paired(setting.plain(plain), setting.ours(ours), setting.times(3, 1))
