"""``Client``: the client's end of a session. It numbers values, plans and calls, batches instructions and reads replies.

The client never computes. It may run far ahead of the workers; only ``request`` waits.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from ..core.errors import RemoteError, SessionClosedError, UsageError, four_parts
from ..core.interrupts import Held
from ..core.mesh import DeviceMesh
from ..core.program import (
    Barrier,
    Call,
    DefaultDtype,
    DefinePlan,
    Draw,
    Forget,
    Free,
    Instruction,
    MeshInfo,
    PendingReply,
    PutFunction,
    Reply,
    Sink,
)
from ..sharding.plan import Plan
from .foreign import foreign_operators, introduction
from .hotpath import Stream, fastpath
from .purepath import FREE_LIMIT, LARGE_NBYTES
from .sites import Site, describe_site

BATCH = 512
"""Instructions per batch at most. Long batches keep client and worker each in warm caches."""

BATCH_NBYTES = 64 << 20
"""Bytes of results per batch, so that a worker is not kept waiting for work worth starting."""

RELEASE_NBYTES = 32 << 20
"""Results from this size on find freed memory given back to the system: they are mapped afresh, and use none of it."""

CACHE_LIMIT = 16384
"""Plans kept; beyond it the oldest quarter is forgotten."""

BARRIER_EVERY = 256
"""Batches between two barriers: bounds what is remembered for error reports, and surfaces failures."""


class Client(Stream):
    """One session's client.

    Any thread may issue operators: a call is appended at one stroke, and ``lock`` keeps batches in order. What each
    computes then depends on their order, as it would with plain tensors.

    Args:
        sink: where batches go.
        check_mesh: raises where the session has no such devices.
        reset: begins another session in place of this one.
        status: tells how the session's processes do.
        synchronous: run every instruction before the next is issued (``DTORCH_SYNC=1``).
    """

    def __init__(
        self,
        sink: Sink,
        check_mesh: Callable[[DeviceMesh | MeshInfo], None],
        reset: Callable[[Client], None] | None = None,
        synchronous: bool = False,
        status: Callable[[], Any] | None = None,
    ) -> None:
        super().__init__()
        self._reset, self._status = reset, status
        self.sink = sink
        self.check_mesh = check_mesh
        self.batch_limit = 1 if synchronous else BATCH
        self.synchronous = synchronous
        self.large_nbytes, self.free_limit = LARGE_NBYTES, FREE_LIMIT
        self.room = BATCH_NBYTES
        self.next_plan = 1
        self.first = 0
        self.history: list[tuple[int, list[Any]]] = []
        # A failed value may be read again long after the history of its call is gone.
        self.failed: dict[int, Site] = {}
        # Plans of integers divided, or of numbers that become tensors, hold for one default dtype.
        self.default_dtype = torch.float32
        self.caches: dict[torch.dtype, dict[tuple, Any]] = {}
        self.cache = self.caches.setdefault(self.default_dtype, {})
        # Numbers by the text of a definition, and for each number its text and how many plans share it.
        self.numbers: dict[bytes, int] = {}
        self.defined: dict[int, list[Any]] = {}
        # Who has found a plan may not have called it yet when it is evicted: workers forget it one eviction later.
        self.evicted: list[int] = []
        self.planned = 0
        self.introduced: set[str] = set()
        self.calls = 0
        self.closed = False
        self.handing = False

    def define(self, plan: Plan) -> int:
        """Teach workers a plan; returns its number. Plans that differ only in global shapes are one to them."""
        text = _text(plan.define)
        with self.lock:
            self.planned += 1
            number = self.numbers.get(text)
            if number is None:
                # A refused mesh leaves nothing behind, so that it is refused again.
                for mesh in plan.define.meshes:
                    self.check_mesh(mesh)
                self._introduce(plan)
                number = self.next_plan
                self.next_plan += 1
                self.emit(msgspec.structs.replace(plan.define, plan=number))
                self.numbers[text], self.defined[number] = number, [text, 0]
            self.defined[number][1] += 1
        return number

    def _introduce(self, plan: Plan) -> None:
        """Tell workers in other processes how to come by the operators of a plan that PyTorch does not bring."""
        for name in foreign_operators(plan.define) if self.sink.travels else ():
            if name not in self.introduced:
                handle = self.new_handle()
                self.emit(PutFunction(handle, introduction(name)))
                self.emit(Free([handle]))
                self.introduced.add(name)

    def remember(self, key: tuple, entry: Any) -> None:
        """Keep a plan (anything with its ``number``) for the next call of this key."""
        with self.lock:
            if len(self.cache) >= CACHE_LIMIT:
                self.forget(self.evicted)
                self.evicted = [self.cache.pop(old).number for old in list(self.cache)[: CACHE_LIMIT // 4]]
            if key in self.cache:
                # Another thread made the same plan meanwhile.
                self.evicted.append(self.cache[key].number)
            self.cache[key] = entry

    def drop(self, firsts: Collection[Any]) -> None:
        """Evict the plans whose keys begin with any of these."""
        with self.lock:
            for cache in self.caches.values():
                self.evicted += [cache.pop(key).number for key in [k for k in cache if k[0] in firsts]]

    def follow_default_dtype(self) -> None:
        """Let what follows run under the default dtype that is set now, and be planned for it."""
        # It begins a batch: nothing of the old dtype runs with it.
        self.flush()
        with self.lock:
            self.default_dtype = torch.get_default_dtype()
            self.cache = self.caches.setdefault(self.default_dtype, {})
            self.emit(DefaultDtype(str(self.default_dtype).removeprefix("torch.")))

    def forget(self, numbers: list[int]) -> None:
        """Let workers drop plans that will not be called again."""
        for number in numbers:
            self.defined[number][1] -= 1
        unused = [number for number in dict.fromkeys(numbers) if not self.defined[number][1]]
        for number in unused:
            self.numbers.pop(self.defined.pop(number)[0], None)
        if unused:
            self.emit(Forget(unused))

    def call(self, call: Call, site: Site, nbytes: int = 0) -> None:
        """Issue a call whose results take ``nbytes``."""
        code, lasti = site or (None, 0)
        self.pack(call.plan, call.inputs, call.outputs, call.scalars, code, lasti, nbytes)

    def free_early(self, nbytes: int) -> None:
        """Issue what has been freed at once; a result of ``nbytes`` comes next."""
        self.emit(Free(self.take_freed(), nbytes >= RELEASE_NBYTES))

    def emit(self, instruction: Instruction) -> None:
        """Issue an instruction that is not a call."""
        with self.lock:
            self.end_run()
            self.outbox.append(instruction)

    def flush(self) -> None:
        """Hand the batch over. From within a hand-over it does nothing: what was issued meanwhile comes after that batch."""
        with self.lock:
            if self.handing:
                return
            with self._hand_over():
                self.sink.submit(*self._take())
        if self.synchronous or len(self.history) >= BARRIER_EVERY:
            self.request(Barrier())

    def _take(self, last: Instruction | None = None, site: Site = None) -> tuple[int, list[Instruction]]:
        """The batch so far, ended by what has been freed and ``last``, and its first sequence number.

        ``site`` is that of a Draw, which counts as a call.
        """
        if self.closed:
            raise closed_error()
        # Freed handles come first, for another thread may use and drop a value before the batch is taken.
        freed, (batch, sites), first = self.take_freed(), self.take(), self.first
        if freed:
            batch.append(Free(freed))
        if last is not None:
            batch.append(last)
        if isinstance(last, Draw):
            sites += site or (None, 0)
        calls = len(sites) // 2
        self.first = first + calls
        self.room = BATCH_NBYTES
        self.history.append((first, sites))
        self.calls += calls
        return first, batch

    def request(self, instruction: Instruction, site: Site = None) -> Any:
        """Issue an instruction that is answered, and wait for the answer.

        Raises:
            RemoteError: an operator failed since the last answer.
        """
        return self.settle(self.send(instruction, site).result())

    def send(self, instruction: Instruction, site: Site = None) -> PendingReply:
        """Issue an instruction that is answered; the caller settles the reply."""
        with self.lock:
            if self.handing:
                raise _busy_error(instruction)
            with self._hand_over():
                return self.sink.request(*self._take(instruction, site))

    @contextmanager
    def _hand_over(self) -> Iterator[None]:
        # An interrupt that lost the batch would undo what earlier lines have done. A finaliser may issue operators at any
        # point, and none may overtake the batch under way.
        with Held():
            self.handing = True
            try:
                yield
            finally:
                self.handing = False

    def settle(self, reply: Reply) -> Any:
        """The result of a reply.

        Raises:
            RemoteError: the reply reports a failed operator.
        """
        if reply.failures:
            raise self._remote_error(reply)
        self.history.clear()
        return reply.result

    def _remote_error(self, reply: Reply) -> RemoteError:
        for failure in reply.failures:
            self.failed.setdefault(failure.sequence, self._site_of(failure.sequence))
        failure = reply.failures[0]
        site = describe_site(self.failed[failure.sequence])
        more = f" ({len(reply.failures) - 1} more operators failed)" if len(reply.failures) > 1 else ""
        text = four_parts(
            f"{failure.operator} failed: {failure.message}{more}",
            "an operator that fails on a worker fails your program at the next value you read",
            f"{site}; on {failure.device}; local shapes {failure.shapes}; plan {failure.plan}",
            "mend the call at that line; set DTORCH_SYNC=1 to stop exactly there. The session stays usable\n" + failure.traceback,
        )
        return RemoteError(
            text,
            operator=failure.operator,
            site=site,
            device=failure.device,
            shapes=failure.shapes,
            worker_traceback=failure.traceback,
        )

    def _site_of(self, sequence: int) -> Site:
        for first, sites in self.history:
            at = 2 * (sequence - first)
            if 0 <= at < len(sites):
                return None if sites[at] is None else (sites[at], sites[at + 1])
        return None

    def reset(self) -> None:
        """Begin a new session on the workers that are there, after one was lost for one.

        All tensors of this one are gone, and ``dtorch.session()`` is another client then. Where another thread has begun one in
        place of this already, that stays.

        Raises:
            SessionClosedError: this session was shut down.
            WorkerLost: there are not as many workers as this session had.
        """
        if self._reset is None:
            raise _by_hand("reset")
        self._reset(self)

    def status(self) -> Any:
        """How the session's workers do, what each is at, and what has passed: a ``dtorch.observability.status.Status``.

        Raises:
            UsageError: the controller does not answer.
        """
        if self._status is None:
            raise _by_hand("status")
        return self._status()

    def end(self) -> None:
        """Its tensors are gone; what carries its instructions is left for another session."""
        self.closed = True
        self.take()

    def close(self) -> None:
        """End the session: workers release everything."""
        self.end()
        self.sink.close()


def _by_hand(what: str) -> UsageError:
    rule, where = "what began a session begins it anew, and tells of it", f"dtorch.session().{what}()"
    return UsageError(four_parts(f"{what}() of a client made by hand", rule, where, "begin it by dtorch.init()"))


def _text(define: DefinePlan) -> bytes:
    """What tells definitions apart. Their numbers are all 0 still."""
    try:
        return msgspec.msgpack.encode(define)
    except OverflowError:
        # msgpack ends at 64 bits.
        return repr(define).encode()


_default_dtype = torch.get_default_dtype
_current: Client | None = None
_starter: Callable[[], Client] | None = None

beginning = threading.RLock()
"""Held by who begins or ends a session: there is one at a time."""


def _forked() -> None:
    """In a forked child: whichever thread held it is not here."""
    global beginning
    beginning = threading.RLock()


os.register_at_fork(after_in_child=_forked)


def set_starter(starter: Callable[[], Client]) -> None:
    """Install what starts the embedded session at a first use."""
    global _starter
    _starter = starter


def set_current(client: Client | None) -> None:
    """Make a client the one that new tensors use."""
    global _current
    _current = client
    if fastpath is not None:
        fastpath.set_current(client)


def current_client() -> Client:
    """The session's client; starts the embedded session at a first use."""
    if _current is None:
        with beginning:
            # Another thread may have begun it meanwhile.
            if _current is None:
                assert _starter is not None
                set_current(_starter())
    assert _current is not None
    if _default_dtype() is not _current.default_dtype:
        _current.follow_default_dtype()
    return _current


def closed_error() -> SessionClosedError:
    """The error for a tensor whose session is over."""
    return SessionClosedError(
        four_parts(
            "a tensor of a session that was shut down, or of another process that this one was forked from",
            "a tensor's data lives as long as its session",
            "the operator on your line",
            "read what you need with to_torch() before dtorch.shutdown(), and make tensors anew after it",
        )
    )


def _busy_error(instruction: Instruction) -> UsageError:
    return UsageError(
        four_parts(
            f"{type(instruction).__name__} while a batch is handed over",
            "a finaliser or signal handler may run in the middle of a batch, where no value can be waited for",
            "the __del__ method, callback or handler that reads a value",
            "keep the tensor there, and read it later from the program itself",
        )
    )


def running() -> Client | None:
    """The session's client, or None while there is no session."""
    return _current
