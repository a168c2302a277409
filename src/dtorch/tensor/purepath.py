"""What the hot path stands on, in Python: the stream of calls, the values they make, what is known of operators and plans.

``_fastpath.c`` has the same classes, and this file says what they must do. ``hotpath.py`` takes the one or the other.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

from ..core.program import Call, Calls
from .value import Group

LARGE_NBYTES = 64 << 10
"""Results from this size on find what died before them freed already, so that memory is used again while it is warm."""

FREE_LIMIT = 64
"""Values that may have died before they are freed, for the same reason."""


class Stream:
    """The calls that were issued and not handed over yet.

    Attributes:
        outbox: instructions, and ended runs of calls; the calls after the last of them are in the open run.
        sites: for each call, the code object and the last instruction of the line that issued it, one after the other.
        freed: handles of values that died.
        default_dtype: the default dtype that calls are issued under.
        cache: plans by key, for that dtype.
        room: bytes of results until the batch is handed over.
        batch_limit: calls until then.
        lock: keeps batches in order.
        free_early: of the client: issue what has been freed at once; a result of so many bytes comes next.
        flush: of the client: hand the batch over.
    """

    free_early: Callable[[int], None]
    flush: Callable[[], None]

    def __init__(self) -> None:
        self.outbox: list[Any] = []
        self.sites: list[Any] = []
        self.freed: list[int] = []
        self.default_dtype: Any = None
        self.cache: dict[tuple, Any] = {}
        self.room = self.batch_limit = 0
        self.large_nbytes, self.free_limit = LARGE_NBYTES, FREE_LIMIT
        self.lock = threading.RLock()
        self._handles = itertools.count(1)
        self._run: list[Call] = []
        self._batch = 0

    def new_handle(self) -> int:
        """Allot the name of a value."""
        return next(self._handles)

    def pack(self, plan: int, inputs: list[int], outputs: list[int], scalars: list, code: Any, lasti: int, nbytes: int) -> None:
        """Append a call whose results take ``nbytes`` to the open run, and where it was issued."""
        with self.lock:
            if self.freed and (nbytes >= self.large_nbytes or len(self.freed) >= self.free_limit):
                self.free_early(nbytes)
            # What is made may let a finaliser issue calls, so it is made before anything is changed.
            call, site = Call(plan, inputs, outputs, scalars), (code, lasti)
            self._run.append(call)
            self.sites += site
            self.room -= nbytes
            self._batch += 1
            if self.room < 0 or self._batch >= self.batch_limit:
                self.flush()

    def end_run(self) -> None:
        """Make the calls so far one instruction of the outbox."""
        fresh: list[Call] = []
        if self._run:
            # It is packed once it is taken: packing takes a while, in which a finaliser may issue more.
            self._run, ended = fresh, self._run
            self.outbox.append(ended)

    def take(self) -> tuple[list[Any], list[Any]]:
        """The batch and its sites, replaced by empty ones."""
        outbox: list[Any] = []
        sites: list[Any] = []
        self.end_run()
        self.outbox, outbox = outbox, self.outbox
        self.sites, sites = sites, self.sites
        self._batch = 0
        return [Calls.of(*i) if type(i) is list else i for i in outbox], sites

    def take_freed(self) -> list[int]:
        """What has been freed, replaced by an empty list."""
        taken, self.freed = self.freed, []
        return taken


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
            self.group = Group(self.handle)
        return self.group


class Known:
    """What the hot path asks of an operator.

    Attributes:
        handler: takes the whole call instead of the planner, or None.
        key: stands for the operator in keys.
        changing: numbers among the arguments come with each call, so a new number needs no new plan.
        quick: a call whose plan is known and simple needs no handler.
    """

    __slots__ = ("changing", "handler", "key", "quick")
    handler: Any
    key: int
    changing: bool
    quick: bool


class Ready:
    """What the hot path asks of a plan.

    Attributes:
        number: the plan's number.
        outs: for each output its spec, and the arguments and keyword arguments that make its wrapper.
        nbytes: what the results take.
        aliases: the one output is a view that shares the first argument's memory on the workers.
        simple: nothing to do but to call it and wrap the outputs.
        bare: the one output is the result, which is a tuple otherwise.
    """

    __slots__ = ("aliases", "bare", "nbytes", "number", "outs", "simple")
    number: int
    outs: tuple[tuple[Any, tuple, dict[str, Any]], ...]
    nbytes: int
    aliases: bool
    simple: bool
    bare: bool
