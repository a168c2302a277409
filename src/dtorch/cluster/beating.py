"""A member's side of the health service: beats, words, and whether the service still answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from ..core.errors import ProtocolError
from .keys import Keys
from .membership import BEAT_S, DEAD_S, Attention, Beat, Member, Silence
from .pulse import REFUSED, VERSION, Bye, Hello, Pulse, Word, encode, read_server
from .rpc import MEMBER, METHOD, SERVICE, Loop, grpc_aio, guarded, member_credentials

log = logging.getLogger("dtorch.health")

MOST_UNANSWERED = 1
"""After more beats than this without an answer, another connection is tried: a cut link gives no other sign."""

QUIET_S = 10.0
"""Who waits for longer is told for what."""

FAREWELL_S = 0.3
"""For how long a member that ends waits for its last words to go out."""


class HealthMember:
    """Tells the health service, again and again, that this process lives. Its owner calls ``close``.

    It beats while other threads are in PyTorch's kernels, which let go of Python's lock.

    Args:
        keys: the cluster's key.
        address: where the service is, ``HOST:PORT``.
        hello: who this is.
        status: what to tell in a beat. Like the other callbacks it is called from the thread of the health service, which it
            must not hold up.
        on_word: called with each word from the service. After one whose text is ``REFUSED`` there is nothing more.
        on_silence: called with the seconds of silence when the service has not answered for ``dead_s``, once until it does.
        beat_s: how often to beat; the service expects the same.
        dead_s: after how much silence the service is held to be gone.
        first_s: for how long its first answer is waited for at least: it may be about to start.
        patience_s: in place of ``dead_s``, for a member that somebody else ends when the service is gone.
    """

    def __init__(
        self,
        keys: Keys,
        address: str,
        hello: Member,
        status: Callable[[], Beat] = Beat,
        on_word: Callable[[Word], None] = lambda word: None,
        on_silence: Callable[[float], None] = lambda silent_s: None,
        *,
        beat_s: float = BEAT_S,
        dead_s: float = DEAD_S,
        first_s: float = 0.0,
        patience_s: float = 0.0,
    ) -> None:
        self._aio, self._credentials, self._address = grpc_aio(), member_credentials(keys), address
        self._member, self._beat_s, self._dead_s = hello, beat_s, dead_s
        self._status = guarded(status, Beat())
        self._on_word, self._on_silence = guarded(on_word, None), guarded(on_silence, None)
        self._silence, self._first_s = Silence(patience_s or dead_s), first_s
        self._unanswered, self._heard_word, self._refused = 0, 0, False
        self._answered = threading.Event()
        self._loop, self._closed = Loop.hold(), False
        self._working = self._loop.begin(self._work())

    def await_answer(self, timeout_s: float) -> bool:
        """Wait for the service's first answer; False when the time is over."""
        if timeout_s > QUIET_S:
            if self._answered.wait(QUIET_S):
                return True
            timeout_s -= QUIET_S
            log.warning("no answer yet from %s; waiting for it for up to %.0f s more", self._address, timeout_s)
        return self._answered.wait(timeout_s)

    def close(self) -> None:
        """Tell the service that this member ends, if it can be told, and end."""
        if not self._closed:
            self._closed = True
            self._loop.finish(self._end())

    async def _work(self) -> None:
        self._ending, self._ended = asyncio.Event(), asyncio.Event()
        looking = asyncio.create_task(self._look())
        try:
            while not self._ending.is_set() and not self._refused:
                await self._connection()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), self._beat_s / 4)
        finally:
            looking.cancel()
            self._ended.set()

    async def _end(self) -> None:
        self._ending.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), 2 * FAREWELL_S)
        self._working.cancel()
        # How it was cut short refers to what it was at.
        del self._working
        await self._ended.wait()

    async def _look(self) -> None:
        attention, told = Attention(self._beat_s), False
        while not self._refused:
            await asyncio.sleep(attention.every_s)
            gap_s, judges = attention.look(time.monotonic())
            self._silence.pass_on(gap_s)
            if self._silence.silent_s == 0.0:
                told = False
            elif judges and not told and self._is_due() and self._silence.is_final():
                told = True
                self._on_silence(self._silence.silent_s)

    def _is_due(self) -> bool:
        return self._answered.is_set() or self._silence.silent_s >= self._first_s

    async def _connection(self) -> None:
        """Beat over one connection, for as long as it is answered."""
        channel = self._aio.secure_channel(self._address, self._credentials, MEMBER)
        call = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
        reading = asyncio.create_task(self._hear(call))
        try:
            async with asyncio.timeout(self._dead_s / 2):
                self._unanswered = 1
                await call.write(encode(Hello(VERSION, self._member, self._heard_word)))
            await self._beat(call, reading)
        except (self._aio.AioRpcError, TimeoutError, asyncio.InvalidStateError) as error:
            log.debug("the connection to %s has ended: %s", self._address, str(error))
        except Exception:
            log.error("the connection to %s has failed\n%s", self._address, traceback.format_exc())
        finally:
            call.cancel()
            reading.cancel()
            await channel.close()

    async def _beat(self, call: Any, reading: asyncio.Task[None]) -> None:
        ending = asyncio.create_task(self._ending.wait())
        try:
            while self._unanswered <= MOST_UNANSWERED:
                await asyncio.wait({reading, ending}, timeout=self._beat_s, return_when=asyncio.FIRST_COMPLETED)
                if reading.done():
                    return
                async with asyncio.timeout(self._dead_s / 2):
                    if ending.done():
                        await self._leave(call, reading)
                        return
                    self._unanswered += 1
                    await call.write(encode(Pulse(self._heard_word, self._status())))
        finally:
            ending.cancel()

    async def _leave(self, call: Any, reading: asyncio.Task[None]) -> None:
        await call.write(encode(Bye()))
        await call.done_writing()
        # The service ends the connection when it has read that.
        await asyncio.wait({reading}, timeout=FAREWELL_S)

    async def _hear(self, call: Any) -> None:
        with contextlib.suppress(self._aio.AioRpcError, asyncio.CancelledError):
            while (frame := await call.read()) is not self._aio.EOF:
                self._unanswered = 0
                self._silence.heard()
                self._answered.set()
                try:
                    message = read_server(frame)
                except ProtocolError as error:
                    log.warning("the health service said what cannot be read: %s", str(error))
                    continue
                if isinstance(message, Word) and message.number > self._heard_word:
                    self._heard_word, self._refused = message.number, message.text == REFUSED
                    self._on_word(message)
