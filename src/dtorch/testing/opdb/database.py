"""PyTorch's own operator database. Importing this imports PyTorch's test utilities, which change global state.

They are imported only by processes that do nothing else: ``torch.backends`` flags can't be set in a process that has them.
"""

from __future__ import annotations

import importlib.util
import sys
import unittest
import warnings
from types import ModuleType
from typing import Any


def _load() -> list[Any]:
    """The database. PyTorch's utilities want ``expecttest`` for a base class of tests, of which nothing is used here."""
    lacking = importlib.util.find_spec("expecttest") is None
    if lacking:
        stand_in: Any = ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return list(importlib.import_module("torch.testing._internal.common_methods_invocations").op_db)
    finally:
        if lacking:
            del sys.modules["expecttest"]


OPERATORS: dict[str, Any] = {op.full_name: op for op in _load()}
"""PyTorch's description (``OpInfo``) of each operator, by its name with the variant's, e.g. ``div.floor_rounding``."""
