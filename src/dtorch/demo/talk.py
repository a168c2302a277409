"""Asking the model: streaming its answer, and timing it."""

from __future__ import annotations

import importlib
import time
from dataclasses import dataclass
from typing import Any

import torch

import dtorch

from .model import Loaded

INDENT = " " * 4


@dataclass(frozen=True)
class Answer:
    """Token ids of question and answer, (1, tokens), and how long the answer took."""

    ids: torch.Tensor
    asked: int
    seconds: float

    @property
    def tokens(self) -> int:
        """Tokens of the answer."""
        return self.ids.shape[1] - self.asked


def ask(loaded: Loaded, question: str, tokens: int) -> Answer:
    """Put a question, printing the answer as it comes; greedy, so that the same model always says the same."""
    inputs = {k: v.to(loaded.model.device) for k, v in loaded.encode(question).items()}
    began = time.perf_counter()
    out = loaded.model.generate(**inputs, max_new_tokens=tokens, do_sample=False, streamer=Streamer(loaded.tokenizer))
    ids = plain(out)
    return Answer(ids.cpu(), inputs["input_ids"].shape[1], time.perf_counter() - began)


def plain(value: Any) -> torch.Tensor:
    """The value of a tensor, global or not, as a plain one."""
    return value.to_torch() if isinstance(value, dtorch.Tensor) else value


class Streamer:
    """Prints an answer while it is made; takes tokens as plain tensors and as global ones."""

    def __init__(self, tokenizer: Any) -> None:
        streaming = importlib.import_module("transformers").TextStreamer
        self.text = streaming(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.text.on_finalized_text = show

    def put(self, tokens: Any) -> None:
        """Take the next tokens; waits for their values."""
        self.text.put(plain(tokens))

    def end(self) -> None:
        """The answer is complete."""
        self.text.end()


def show(text: str, stream_end: bool = False) -> None:
    """Print a piece of an answer at once, further lines indented like the first."""
    print(text.replace("\n", f"\n{INDENT}"), flush=True, end="\n" if stream_end else "")
