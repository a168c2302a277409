"""What processes say to each other has a version, which is another when what they say is."""

from __future__ import annotations

import hashlib
from types import ModuleType

import msgspec
import pytest

from dtorch.cluster import pulse
from dtorch.cluster.membership import Beat, Member
from dtorch.core import control, program


def structs(module: ModuleType) -> list[type[msgspec.Struct]]:
    """Those of a module."""
    own = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]
    return [kind for kind in own if issubclass(kind, msgspec.Struct)]


PAGES = {
    "instructions": (program.VERSION, structs(program)),
    "control": (control.VERSION, structs(control)),
    "health": (pulse.VERSION, [*structs(pulse), Member, Beat]),
}

RECORDED = {
    "instructions": (4, "d7a8de92c6850bc7"),
    "control": (3, "49ea41e6c6ad2941"),
    "health": (2, "a137301ec608f459"),
}
"""By page its version, and what it said then."""


def said(page: list[type[msgspec.Struct]]) -> str:
    """What stands for structs: their names, fields, types and tags."""
    of_each = [(s.__struct_config__.tag, s.__struct_config__.array_like, s.__name__, s.__annotations__) for s in page]
    return hashlib.sha256(repr(of_each).encode()).hexdigest()[:16]


@pytest.mark.parametrize("page", PAGES)
def test_what_is_said_in_another_way_has_another_version(page: str) -> None:
    version, page_structs = PAGES[page]
    now, (recorded, then) = said(page_structs), RECORDED[page]
    assert version >= recorded
    assert (version > recorded) == (now != then), "raise the VERSION of the page where it has changed since it was last raised"
    assert version == recorded, f"record it here: ({version}, {now!r})"
