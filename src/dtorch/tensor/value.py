"""``Value``: a client's hold on data in workers, and what of it is shared with views.

A view that stays where its base is aliases it on every worker, as in PyTorch. A view that had to communicate is a copy:
its group carries a ``Link`` to the base. Reading through a link whose base has changed takes the copy anew; writing
through it writes the base. So writes are never lost, whatever the placement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Group:
    """Values that share memory on the workers.

    Attributes:
        version: counts writes to any of them.
        link: how the group's memory derives from another group's, or None.
    """

    __slots__ = ("link", "version")

    def __init__(self) -> None:
        self.version = 0
        self.link: Link | None = None


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


class Value:
    """Owner of one handle: when it dies, the workers forget the value, in stream order.

    ``settled`` is the reduced form of a partial value, with the group's version that it was made of.
    """

    __slots__ = ("client", "group", "handle", "settled")

    def __init__(self, client: Any, handle: int) -> None:
        self.client = client
        self.handle = handle
        self.group: Group | None = None
        self.settled: tuple[int, Any] | None = None

    def __del__(self) -> None:
        # An interrupt may have come between its making and its filling.
        if hasattr(self, "handle"):
            self.client.freed.append(self.handle)

    def shared_group(self) -> Group:
        """The value's group, made at first need."""
        if self.group is None:
            self.group = Group()
        return self.group
