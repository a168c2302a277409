"""What of a value is shared with views.

A view that stays where its base is aliases it on every worker, as in PyTorch. A view that had to communicate is a copy:
its group carries a ``Link`` to the base. Reading through a link whose base has changed takes the copy anew; writing
through it writes the base. So writes are never lost, whatever the placement.

A group's memory may also be absent for a while: then whoever is about to use it has it brought back first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Group:
    """Values that share memory on the workers.

    Attributes:
        version: counts writes to any of them.
        link: how the group's memory derives from another group's, or who brings it back, or None.
        root: handle of the value that the others are views of.
    """

    __slots__ = ("__weakref__", "link", "root", "version")

    def __init__(self, root: int) -> None:
        self.version = 0
        self.root = root
        self.link: Link | Absent | None = None


class Absent(Protocol):
    """Stands for memory that was given back."""

    def bring(self) -> None:
        """Have it there again, and no longer stand for it."""


class Link:
    """A group whose memory is a copy of a view.

    Attributes:
        base: the tensor that was viewed.
        root: a tensor over the group's whole memory.
        view: takes the base, gives the view anew.
        scatter: takes (base, view), gives the base with the view's elements written; None where there is no inverse.
        seen: versions of base's and the own group when they last agreed.
    """

    __slots__ = ("base", "root", "scatter", "seen", "view")

    def __init__(
        self, base: Any, root: Any, view: Callable[[Any], Any], scatter: Callable[[Any, Any], Any] | None, seen: int
    ) -> None:
        self.base, self.root, self.view, self.scatter, self.seen = base, root, view, scatter, seen
