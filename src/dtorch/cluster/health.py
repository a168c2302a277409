"""The health service: hears the beats of all members, answers each, and tells who joined, left or was lost.

One thread serves any number of members. All of its own work is in ``Membership``; here are sockets and the clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from ..core.errors import ProtocolError, UsageError, four_parts
from .keys import Keys
from .membership import (
    BEAT_S,
    DEAD_S,
    LOOKS_A_BEAT,
    BeatArrived,
    BrokenOff,
    Change,
    Departed,
    Introduced,
    Left,
    Looked,
    Lost,
    Member,
    Membership,
    Refused,
    Standing,
)
from .pulse import LARGEST_NBYTES, REFUSED, Bye, Heard, Hello, OtherVersion, Pulse, Word, encode, read_hello, read_member
from .rpc import METHOD, SERVER, SERVICE, STATUS, Loop, grpc_aio, guarded, pinging, server_credentials

log = logging.getLogger("dtorch.health")

LOOPBACK = "127.0.0.1:0"
START_S = 30.0
FAREWELL_S = 0.3
"""For how long words that are on their way hold up the end."""

MOST_WORDS = 64
"""Of words that a member has not heard, the newest so many are kept."""

HEARD = encode(Heard())


class HealthServer:
    """Hears the members of a cluster. Its owner calls ``close``.

    Args:
        keys: the cluster's key.
        address: where to listen, ``HOST:PORT``; port 0 takes a free one.
        on_event: called for each change, from the service's thread, which it must not hold up.
        beat_s: how often members are to be heard.
        dead_s: after how much silence one is lost.
        spare: asked from the same thread before a member is lost to silence; True when it is known to live.
        status: tells, as bytes, what someone who asks shall know; nobody may ask when omitted.

    Attributes:
        address: where members find it.
        dropped: how many messages and members were not taken, by reason.

    Raises:
        UsageError: it cannot listen there.
    """

    def __init__(
        self,
        keys: Keys,
        address: str = LOOPBACK,
        on_event: Callable[[Change], None] = lambda change: None,
        *,
        beat_s: float = BEAT_S,
        dead_s: float = DEAD_S,
        spare: Callable[[Member], bool] = lambda member: False,
        status: Callable[[], Future[bytes]] | None = None,
    ) -> None:
        self._aio, self._on_event, self._dead_s = grpc_aio(), guarded(on_event, None), dead_s
        self._status = status
        self._look_s, self._options = beat_s / LOOKS_A_BEAT, (*SERVER, *pinging(beat_s, dead_s))
        self._membership = Membership(beat_s, dead_s, guarded(spare, False))
        self._links: dict[str, _Link] = {}
        # A service that follows this one on the same address counts on.
        self._numbers = itertools.count(time.time_ns())
        self._sending: set[asyncio.Task[None]] = set()
        self.dropped: Counter[str] = Counter()
        self._loop, self._closed = Loop.hold(), False
        try:
            self.address = self._loop.begin(self._start(keys, address)).result(START_S)
        except BaseException:
            self._loop.let_go()
            raise

    def standings(self) -> list[Standing]:
        """The members that are there, with what they told last."""
        return self._membership.standings()

    def say(self, name: str, text: str, detail: str = "") -> None:
        """Tell a member something, from any thread: now, or when its connection is back. To who is not there nothing is said."""
        self._loop.begin(self._say(name, text, detail))

    def close(self) -> None:
        """Stop listening, and end all connections. Members are not told: to them the service falls silent."""
        if not self._closed:
            self._closed = True
            self._loop.finish(self._end())

    async def _start(self, keys: Keys, address: str) -> str:
        self._server = self._aio.server(options=self._options)
        handler = self._aio_handler()
        self._server.add_generic_rpc_handlers((handler,))
        host, _, port = address.rpartition(":")
        try:
            if not host or not port.isdigit():
                raise ValueError("it is not HOST:PORT")
            bound = self._server.add_secure_port(address, server_credentials(keys))
        except (RuntimeError, ValueError) as error:
            await self._server.stop(None)
            del self._server
            given, rule = f"the address {address!r}: {error}", "the health service listens at a free port of this machine"
            raise UsageError(four_parts(given, rule, "starting the health service", "give another HOST:PORT")) from error
        await self._server.start()
        self._looking = asyncio.create_task(self._look())
        return f"{host}:{bound}"

    def _aio_handler(self) -> Any:
        import grpc

        handlers = {METHOD: grpc.stream_stream_rpc_method_handler(self._serve)}
        if self._status is not None:
            handlers[STATUS] = grpc.unary_unary_rpc_method_handler(partial(self._tell, self._status))
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    async def _tell(self, status: Callable[[], Future[bytes]], _: bytes, context: Any) -> bytes:
        import grpc

        # Held up, or at its end, it does not answer.
        with contextlib.suppress(TimeoutError, OSError):
            return await asyncio.wait_for(asyncio.wrap_future(status()), self._dead_s)
        context.set_code(grpc.StatusCode.UNAVAILABLE)
        context.set_details(f"it has not answered within {self._dead_s:.0f} s")
        return b""

    async def _end(self) -> None:
        if self._sending:
            await asyncio.wait(self._sending, timeout=FAREWELL_S)
        self._looking.cancel()
        await self._server.stop(None)
        # gRPC's own thread and sockets end with the last object of its.
        del self._server
        self._links.clear()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(self._look_s)
            self._handle(Looked(time.monotonic()))

    def _handle(self, event: Any) -> list[Change]:
        changes = self._membership.handle(event)
        for change in changes:
            if isinstance(change, Lost | Left):
                self._drop_link(change.member.name)
            self._on_event(change)
        return changes

    def _drop_link(self, name: str) -> None:
        link = self._links.pop(name, None)
        if link is not None:
            link.cancel()

    async def _serve(self, _: Any, context: Any) -> None:
        """One connection of a member, until it ends."""
        try:
            async with asyncio.timeout(self._dead_s):
                hello = await self._greeted(context)
        except TimeoutError:
            return self._drop("no hello", f"within {self._dead_s} s")
        link = hello and await self._link(hello, context)
        if not link:
            return None
        try:
            return await self._hear(link, context)
        finally:
            if self._links.get(link.member.name) is link:
                self._handle(BrokenOff(link.member))
            await link.end()

    async def _hear(self, link: _Link, context: Any) -> None:
        while (frame := await self._read(context)) is not None:
            try:
                message = read_member(frame)
            except ProtocolError as error:
                self._drop("malformed", str(error))
                continue
            if isinstance(message, Pulse):
                link.forget(message.heard)
                self._handle(BeatArrived(link.member, message.beat))
                await link.write(HEARD)
            elif isinstance(message, Bye):
                self._handle(Departed(link.member))
                return

    async def _read(self, context: Any) -> bytes | None:
        """The next message; None at the end."""
        while (frame := await context.read()) is not self._aio.EOF:
            if len(frame) <= LARGEST_NBYTES:
                return frame
            self._drop("oversized", f"a message of {len(frame)} bytes")
        # Also how the connection of a member that was killed ends, so it is no warning.
        self.dropped["broken off"] += 1
        log.debug("a connection was broken off, over a message that is far too long or by its end")
        return None

    async def _greeted(self, context: Any) -> Hello | None:
        while (frame := await self._read(context)) is not None:
            try:
                return read_hello(frame)
            except OtherVersion as error:
                self._drop("other version", str(error))
                await self._refuse(context, str(error))
                return None
            except ProtocolError as error:
                self._drop("malformed", str(error))
        return None

    async def _link(self, hello: Hello, context: Any) -> _Link | None:
        """The member's connection from now on; None if it may not take part."""
        before = self._links.get(hello.member.name)
        for change in self._handle(Introduced(hello.member)):
            if isinstance(change, Refused):
                self._drop("refused", change.why)
                await self._refuse(context, change.why)
                return None
        link = _Link(hello.member, context)
        if before is not None and before.member == hello.member:
            before.cancel()
            link.words = before.words
        self._links[hello.member.name] = link
        link.forget(hello.heard)
        await link.write(HEARD, *map(encode, link.words))
        return link

    async def _refuse(self, context: Any, why: str) -> None:
        await _write(context, encode(Word(next(self._numbers), REFUSED, why)))

    async def _say(self, name: str, text: str, detail: str) -> None:
        link = self._links.get(name)
        if link is None:
            log.debug("%r is not there to hear %r", name, text)
            return
        word = Word(next(self._numbers), text, detail)
        link.words.append(word)
        sending = asyncio.create_task(link.write(encode(word)))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)

    def _drop(self, reason: str, what: str) -> None:
        self.dropped[reason] += 1
        # Whoever sends many shall not fill the log. What is logged is text: an exception would hold on to gRPC's objects.
        if str(self.dropped[reason]).strip("0") == "1":
            log.warning("dropped, %s for the %d. time: %s", reason, self.dropped[reason], what)


class _Link:
    """A member's newest connection."""

    def __init__(self, member: Member, context: Any) -> None:
        self.member, self._context = member, context
        self._task, self._writing, self._ended = asyncio.current_task(), asyncio.Lock(), False
        self.words: deque[Word] = deque(maxlen=MOST_WORDS)

    def forget(self, heard: int) -> None:
        """Words up to this number were heard."""
        while self.words and self.words[0].number <= heard:
            self.words.popleft()

    async def write(self, *frames: bytes) -> None:
        """Send, with nothing in between: of words that come out of order only the newest is heard."""
        async with self._writing:
            for frame in frames:
                if not self._ended:
                    await _write(self._context, frame)

    async def end(self) -> None:
        """Write no more. gRPC's part of it is gone with who serves it, and the process with who touches that."""
        async with self._writing:
            self._ended = True

    def cancel(self) -> None:
        """End it."""
        # A member that leaves ends its own.
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()


async def _write(context: Any, frame: bytes) -> None:
    """Send; nothing happens where the connection has ended, for its member comes back or falls silent."""
    try:
        await context.write(frame)
    except Exception as error:
        log.debug("a connection has ended: %s", str(error))
