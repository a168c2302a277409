"""The call of a local operator, written as Python source once so that running it costs no interpretation."""

from __future__ import annotations

import keyword
import types
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch

from ..core.program import Const, Local, Scalar, Slot, Vary
from .operators import Chooser, resolve
from .running import fastrun

Namespace = dict[str, Any]

SLOT, SCALAR, CONSTANT, LIST = range(4)
"""Kinds of arguments, as ``_fastrun.c`` numbers them."""


def constant(value: Any, device_of: Callable[[str], torch.device]) -> Any:
    """The Python object of an argument as it came over the wire, lists included.

    Args:
        device_of: the physical device of a device type.
    """
    if isinstance(value, list):
        return [constant(v, device_of) for v in value]
    if not isinstance(value, Const):
        return value
    if value.kind == "device":
        return device_of(value.text)
    if value.kind == "complex":
        return complex(value.text)
    return getattr(torch, value.text)


class Template:
    """Source text of one operator call.

    The text uses ``fn`` for the operator, ``s`` for the call's scalars, ``c`` for the coordinate's number, and names of
    ``namespace`` for constants.

    Args:
        spell: source text of the piece in a slot.
        held: numbers of the coordinates that the call runs for; ``c`` numbers these.
    """

    def __init__(
        self, step: Local, spell: Callable[[int], str], device_of: Callable[[str], torch.device], held: Sequence[int] = (0,)
    ) -> None:
        self.namespace: Namespace = {}
        self._step = step
        self._single: Any = None
        self._spell = spell
        self._device_of = device_of
        self._held = held
        self.namespace["fn"] = Chooser(resolve(step.operator), self._settle)

    @cached_property
    def text(self) -> str:
        """The call."""
        words = [self._text(a) for a in self._step.args]
        words += [self._keyword(name, value) for name, value in self._step.kwargs.items()]
        return f"fn({', '.join(words)})"

    def function(self, source: str, name: str) -> Callable[..., Any]:
        """Compile the source of one function, which may use ``namespace``; ``name`` is the file name in tracebacks."""
        exec(_code(source, name), self.namespace)
        return self.namespace["run"]

    def compiled(self) -> Any:
        """The call in C, where that was built: takes the first piece of its inputs, gives one tensor. None if it cannot be."""
        step = self._step
        arguments = [*step.args, *step.kwargs.values()]
        if fastrun is None or any(isinstance(a, list) and any(isinstance(i, list) and _changes(i) for i in a) for a in arguments):
            return None
        parts = [part for a in arguments for part in self._parts(a)]
        self._single = fastrun.Single(self.namespace["fn"], tuple(parts), tuple(step.kwargs) or None)
        return self._single

    def _parts(self, value: Any) -> list[tuple[int, int, Any]]:
        """Kind, index and constant of an argument; a list with slots or scalars in it is followed by its items'."""
        if isinstance(value, Slot):
            return [(SLOT, value.index, None)]
        if isinstance(value, Scalar):
            return [(SCALAR, value.index, None)]
        if isinstance(value, list) and _changes(value):
            return [(LIST, len(value), None), *(part for item in value for part in self._parts(item))]
        return [(CONSTANT, 0, constant(value, self._device_of))]

    def _settle(self, chosen: Callable[..., Any]) -> None:
        self.namespace["fn"] = chosen
        if self._single is not None:
            self._single.fn = chosen

    def _text(self, value: Any) -> str:
        if isinstance(value, Slot):
            return self._spell(value.index)
        if isinstance(value, Scalar):
            return f"s[{value.index}]"
        if isinstance(value, Vary):
            values = [value.values[number] for number in self._held]
            return self._name(constant(values, self._device_of)) + "[c]"
        if isinstance(value, list) and _changes(value):
            return "[" + ", ".join(self._text(v) for v in value) + "]"
        return self._name(constant(value, self._device_of))

    def _keyword(self, name: str, value: Any) -> str:
        text = self._text(value)
        return f"**{{{name!r}: {text}}}" if keyword.iskeyword(name) else f"{name}={text}"

    def _name(self, value: Any) -> str:
        name = f"k{len(self.namespace)}"
        self.namespace[name] = value
        return name


@lru_cache(maxsize=4096)
def _code(source: str, name: str) -> types.CodeType:
    """Plans of one operator differ in constants and meshes, seldom in source."""
    return compile(source, name, "exec")


def slots_of(tree: Any) -> list[int]:
    """Slots among arguments, in order, repeats included."""
    if isinstance(tree, Slot):
        return [tree.index]
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [s for item in tree for s in slots_of(item)] if isinstance(tree, list) else []


def chosen(tree: Any, number: int) -> Any:
    """Arguments for one coordinate: what differs by coordinate becomes what it is there."""
    if isinstance(tree, dict):
        return {name: chosen(value, number) for name, value in tree.items()}
    if isinstance(tree, list):
        return [chosen(value, number) for value in tree]
    return tree.values[number] if isinstance(tree, Vary) else tree


def _changes(value: Any) -> bool:
    if isinstance(value, list):
        return any(_changes(v) for v in value)
    return isinstance(value, Slot | Scalar | Vary)
