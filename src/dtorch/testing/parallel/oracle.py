"""What plain PyTorch answers: once for each model and input."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from .zoo import FOR_LOSS, MODELS, PAD, Inputs

NEW_TOKENS = 5
KEPT = 2
"""Answers that are kept. Cells come sorted by their inputs, and the gradients of a real model take much memory."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Outputs without a gradient, the gradients of the loss by name, and the tokens of greedy generation."""

    inputs: Inputs
    logits: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    tokens: torch.Tensor | None


@lru_cache(maxsize=1)
def plain(model: str) -> Any:
    """A model of the zoo, not to be changed."""
    return MODELS[model].make()


@lru_cache(maxsize=KEPT)
def answer(model: str, inputs: tuple[int, int]) -> Answer:
    """What a model answers to so many samples and tokens."""
    module, given = plain(model), MODELS[model].inputs(*inputs)
    outputs, gradients = logits(module, given), gradients_of(module, given)
    module.zero_grad()
    return Answer(given, outputs, gradients, generated(module, given) if MODELS[model].generates else None)


def logits(module: Any, given: Inputs) -> torch.Tensor:
    """Outputs, without a gradient and without a loss."""
    with torch.no_grad():
        return module(**_prompt(given)).logits


def gradients_of(module: Any, given: Inputs) -> dict[str, torch.Tensor | None]:
    """Gradients of the loss by the parameters' names; they stay with the parameters."""
    module(**given).loss.backward()
    return {name: p.grad for name, p in module.named_parameters()}


def generated(module: Any, given: Inputs) -> torch.Tensor:
    """Greedy continuation, with the key/value cache."""
    return module.generate(**_prompt(given), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=PAD)


def _prompt(given: Inputs) -> Inputs:
    return {name: value for name, value in given.items() if name not in FOR_LOSS}
