"""Errors of loading and saving."""

from __future__ import annotations

import importlib
from typing import Any

from ...core.errors import UsageError, four_parts

LOAD = "dtorch.load_pretrained(module_or_class, path, mesh)"
SAVE = "dtorch.save_pretrained(module, path)"


def problem(given: str, rule: str, remedy: str, where: str = LOAD) -> UsageError:
    """A four-part error."""
    return UsageError(four_parts(given, rule, where, remedy))


def package(name: str, where: str = LOAD) -> Any:
    """An optional package.

    Raises:
        UsageError: it is not there.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        rule = "weights of Hugging Face models are read and written with transformers 5 and safetensors"
        raise problem(f"no package {name} ({error})", rule, 'pip install "dtorch[hf]"', where) from error
