"""Nested arguments and results of modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, tuple | list | dict):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(item)
