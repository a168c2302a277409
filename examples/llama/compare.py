"""The example beside the model of transformers: the same weights and tokens, and how far apart the answers are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dtorch import DeviceMesh, Tensor, explain, nn

from .model import Llama

FORWARD, BACKWARD = 1e-5, 1e-4
SMALL = 1e-3
"""A gradient is measured by its own largest value, or by this part of the largest of all where that is more."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What came out.

    Attributes:
        logits, gradients: the largest error, by the largest value; ``worst`` names the gradient.
        losses: ours, and that of transformers.
        forward, backward: numbers of collectives by kind.
        nbytes: of weights on each device, by id; ``whole`` of all of them once.
    """

    logits: float
    gradients: float
    worst: str
    losses: tuple[float, float]
    forward: Counter[str]
    backward: Counter[str]
    nbytes: Counter[int]
    whole: int

    @property
    def right(self) -> bool:
        """Whether both errors are within bounds."""
        return self.logits <= FORWARD and self.gradients <= BACKWARD

    def lines(self) -> Iterator[str]:
        """The figures, for reading."""
        yield f"loss {self.losses[0]:.6f}, transformers {self.losses[1]:.6f}"
        yield f"logits: largest error {self.logits:.1e} of the largest logit (at most {FORWARD:.0e})"
        yield f"gradients: largest error {self.gradients:.1e} of the largest value, in {self.worst} (at most {BACKWARD:.0e})"
        yield f"forward: {_listed(self.forward)}; backward: {_listed(self.backward)}"
        yield f"weights: {max(self.nbytes.values()):,} bytes on a device at most, of {self.whole:,}"


def distributed(plain: Any, mesh: DeviceMesh, sp: bool = False, zero: int = 3) -> Llama:
    """The example with the weights of a ``LlamaForCausalLM``."""
    model = Llama(plain.config, mesh, sp)
    model.load_state_dict(plain.state_dict())
    return nn.fully_shard(model, zero=zero)


def compare(plain: Any, model: Llama, ids_BT: torch.Tensor) -> Comparison:
    """One forward and backward pass of both, without dropout."""
    model.zero_grad()
    plain.zero_grad()
    expected = plain(input_ids=ids_BT, labels=ids_BT)
    expected.loss.backward()
    with torch.no_grad(), explain() as forward:
        logits_BTV = model(ids_BT)
    loss = model.loss(ids_BT)
    with explain() as backward:
        loss.backward()
    errors = _gradient_errors(model, plain)
    worst = max(errors, key=errors.__getitem__)
    return Comparison(
        logits=_error(logits_BTV, expected.logits),
        gradients=errors[worst],
        worst=worst,
        losses=(loss.item(), expected.loss.item()),
        forward=Counter(event.comm.kind for event in forward.events),
        backward=Counter(event.comm.kind for event in backward.events),
        nbytes=_nbytes(model),
        whole=sum(p.numel() * p.element_size() for p in plain.parameters()),
    )


def _gradient_errors(model: Llama, plain: Any) -> dict[str, float]:
    expected = {name: p.grad for name, p in plain.named_parameters()}
    least = SMALL * max(float(grad.abs().max()) for grad in expected.values())
    return {name: _error(p.grad, expected[name], least) for name, p in model.named_parameters()}


def _error(actual: Tensor, expected: torch.Tensor, least: float = 0.0) -> float:
    difference = (actual.to_torch() - expected.detach()).abs().max()
    return float(difference) / max(float(expected.detach().abs().max()), least)


def _nbytes(model: Llama) -> Counter[int]:
    """Bytes of weights on each device, by id."""
    total: Counter[int] = Counter()
    for parameter in model.parameters():
        for device, piece in zip(parameter.device_mesh.ids, parameter.shards, strict=True):
            total[device] += piece.numel() * piece.element_size()
    return total


def _listed(kinds: Counter[str]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())) or "nothing moves"
