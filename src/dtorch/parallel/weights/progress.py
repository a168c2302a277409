"""A progress bar over bytes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def bar(title: str, total: int, shown: bool | None) -> Iterator[Any]:
    """Something with ``update(nbytes)``: a bar on stderr, or nothing.

    Args:
        total: bytes in all.
        shown: whether to show it; None leaves that to whether stderr is a terminal.
    """
    visible = sys.stderr.isatty() if shown is None else shown
    if not visible or importlib.util.find_spec("tqdm") is None:
        yield _Line(title, total) if visible else Silent()
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=title, unit="B", unit_scale=True, file=sys.stderr) as shown_bar:
        yield shown_bar


class Silent:
    """A bar that nobody sees."""

    def update(self, nbytes: int) -> None:
        """Note that so many bytes more are done."""


class _Line:
    """A line on stderr for every tenth."""

    def __init__(self, title: str, total: int) -> None:
        self.title, self.total, self.done, self.tenths = title, max(total, 1), 0, 0

    def update(self, nbytes: int) -> None:
        """Note that so many bytes more are done."""
        self.done += nbytes
        tenths = 10 * self.done // self.total
        if tenths > self.tenths:
            self.tenths = tenths
            print(f"{self.title}: {tenths}0%", file=sys.stderr)
