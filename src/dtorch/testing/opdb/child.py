"""The process that runs one operator. It is forked from a server that has read the database already."""

from __future__ import annotations

from typing import Any

import torch

from .database import OPERATORS
from .run import run_operator
from .settings import Settings


def main(name: str, settings: Settings, at: Any, answer: Any) -> None:
    """Run an operator and send its record.

    Args:
        at: shared memory that always holds the text of the case at hand, for when this process dies.
        answer: connection that takes the record, as ``Record.to_json`` gives it.
    """
    torch.set_num_threads(1)

    def tell(case: str) -> None:
        at.value = case.encode()[: len(at) - 1]

    answer.send(run_operator(OPERATORS[name], settings, tell).to_json())
    answer.close()
