"""Functions, and operators that PyTorch does not bring with it, on their way to workers in other processes.

Whoever registers an operator does so in one process. Workers are told how to come by it before the first plan that uses it:
they import the module that registers it, load its libraries, or register the function that the program itself has made one.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import torch
from torch._library.custom_ops import OPDEFS

from ..core.errors import UsageError, four_parts
from ..core.program import DefinePlan, Local

BROUGHT = frozenset({"aten", "dtorch", "prims"})
"""Namespaces that every worker has."""


def foreign_operators(plan: DefinePlan) -> Iterator[str]:
    """Names, as ``namespace::name``, of operators that a plan uses and that a worker may lack."""
    for step in plan.steps:
        if isinstance(step, Local) and step.operator.partition("::")[0] not in BROUGHT:
            yield step.operator.rpartition(".")[0]


def introduction(name: str) -> bytes:
    """What makes an operator known to the process that unpickles it.

    Raises:
        UsageError: nothing says how another process could come by it.
    """
    definition = OPDEFS.get(name)
    module = _module_at(_place(name)) if definition is None else _importable(definition._init_fn.__module__)
    libraries = sorted(torch.ops.loaded_libraries)
    if module is None and definition is None and not libraries:
        given = f"the operator {name}, registered at {_place(name) or 'no known place'}"
        rule = "workers are processes of their own, which register operators by importing what registers them"
        remedy = "register it by torch.library.custom_op, or in a module that workers can import"
        raise UsageError(four_parts(given, rule, "its call", remedy))
    made = None
    if module is None and definition is not None:
        made = definition._init_fn, definition._schema, _written(definition._opoverload)
    of = None if definition is None else definition._init_fn
    return pickled(_Introduction(name, module, libraries, made), of, name, "the function that was made an operator")


def pickled(sent: Any, function: Any, name: str, where: str) -> bytes:
    """What is made of a function, on its way to another process.

    Raises:
        UsageError: it refers to what cannot leave this one.
    """
    home = sys.modules.get(getattr(function, "__module__", None) or "")
    if home is not None and _importable(home.__name__) is None and home.__name__ != "__main__":
        # Made in this process, so no other can import it.
        cloudpickle.register_pickle_by_value(home)
    try:
        return cloudpickle.dumps(_Sent(sent))
    except Exception as error:
        given = f"{name}: {type(error).__name__}: {error}"
        rule = "a function for worker processes is pickled, with what it refers to"
        remedy = "let it refer to plain data only: locks, files, sockets, generators and global tensors cannot travel"
        raise UsageError(four_parts(given, rule, where, remedy)) from error


class _Sent:
    """Unpickled, what was sent, which may refer to modules that are found here by now."""

    def __init__(self, sent: Any) -> None:
        self.sent = sent

    def __reduce__(self) -> tuple[Callable[..., Any], tuple]:
        # Arguments are unpickled in their order.
        return _second, (_Found(), self.sent)


class _Found:
    """Unpickled, makes modules be looked for where this process finds them now."""

    def __reduce__(self) -> tuple[Callable[..., None], tuple]:
        return _look_in, (list(map(os.path.abspath, sys.path)),)


def _look_in(places: list[str]) -> None:
    sys.path += [place for place in places if place not in sys.path]


def _second(_: None, sent: Any) -> Any:
    return sent


class _Introduction:
    """Unpickled, the operator's name."""

    def __init__(self, *given: Any) -> None:
        self.given = given

    def __reduce__(self) -> tuple[Callable[..., str], tuple]:
        return _introduced, self.given


def _introduced(name: str, module: str | None, libraries: list[str], made: tuple[Any, str, list[str]] | None) -> str:
    """Register an operator in this process, unless it is there."""
    if module is not None and not _is_here(name):
        importlib.import_module(module)
    for library in libraries:
        if not _is_here(name):
            torch.ops.load_library(library)
    if made is not None and not _is_here(name):
        function, schema, written = made
        torch.library.custom_op(name, function, mutates_args=written, schema=schema)
    return name


def _written(operator: torch._ops.OpOverload) -> list[str]:
    return [a.name for a in operator._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def _is_here(name: str) -> bool:
    return torch._C._dispatch_has_kernel(name)


def _place(name: str) -> str:
    """The file from which an operator was registered."""
    found = re.search(r"^debug: registered at (.*):\d+$", torch._C._dispatch_dump(name), re.MULTILINE)
    return found[1] if found else ""


def _module_at(place: str) -> str | None:
    known = list(sys.modules.items())
    return next((n for n, module in known if getattr(module, "__file__", None) == place and _importable(n)), None)


def _importable(module: str) -> str | None:
    """The name of a module by which another process can import it: not that of the program itself."""
    known = sys.modules.get(module)
    return module if module != "__main__" and getattr(known, "__spec__", None) is not None else None
