"""The hot paths that are written in C: each has the same in Python beside it, for machines where it could not be built."""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType

PURE_PYTHON = "DTORCH_PURE_PYTHON"
"""Environment variable: at ``1`` the C modules are not used."""


def compiled(name: str) -> ModuleType | None:
    """A C module of dtorch, or None where it was not built or is not wanted."""
    if os.environ.get(PURE_PYTHON) == "1":
        return None
    try:
        return import_module(name)
    except ModuleNotFoundError:
        return None
