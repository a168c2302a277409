"""gRPC as the health service uses it: one thread for all of a process, mutual TLS, no noise.

gRPC is imported by who first needs it; a program without worker processes never does.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from types import ModuleType
from typing import Any, ClassVar, TypeVar

from .keys import CERTIFIED_NAME, Keys
from .pulse import LARGEST_NBYTES

T = TypeVar("T")

log = logging.getLogger("dtorch.health")

SERVICE, METHOD, STATUS = "dtorch.Health", "Beat", "Status"

END_S = 10.0
"""How long an end may take that somebody waits for. It takes milliseconds, but on a machine with no time for it."""

QUIET = {"GRPC_VERBOSITY": "NONE", "GRPC_ENABLE_FORK_SUPPORT": "0", "GRPC_TRACE": ""}
"""gRPC writes to the terminal by itself, also when somebody else in the process forks."""

MOST_STATUS_NBYTES = 16 << 20
"""A status of more is not told: it has some 300 bytes for each worker."""

COMMON = (
    ("grpc.max_metadata_size", 8 * 1024),
    # Else a proxy of the environment would be asked for loopback addresses.
    ("grpc.enable_http_proxy", 0),
)
# gRPC ends a connection over a longer one without a word. A little longer ones are dropped and counted by who reads them.
BEATS = (("grpc.max_receive_message_length", 4 * LARGEST_NBYTES),)
SERVER = (
    *COMMON,
    *BEATS,
    ("grpc.max_send_message_length", MOST_STATUS_NBYTES),
    # Else two services could share a port, and each get some of the members.
    ("grpc.so_reuseport", 0),
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
)
GUEST = (
    *COMMON,
    ("grpc.max_send_message_length", LARGEST_NBYTES),
    ("grpc.ssl_target_name_override", CERTIFIED_NAME),
    # Each attempt is a connection of its own: one that a cut link has left hanging is not taken up again.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)
MEMBER = (*GUEST, *BEATS)
ASKING = (*GUEST, ("grpc.max_receive_message_length", MOST_STATUS_NBYTES))


def pinging(beat_s: float, dead_s: float) -> tuple[tuple[str, int], ...]:
    """Options of a server that ends the connections of those that do not answer.

    gRPC's own threads answer a ping, and need no lock of Python's for that; of a process that is stopped they do not, and behind
    a cut link neither. A ping goes out when nothing has come for ``beat_s``, and an answer is there before ``dead_s``.
    """
    wait_ms = round((dead_s - beat_s) * 1e3)
    waits = ("grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
    return ("grpc.keepalive_time_ms", round(beat_s * 1e3)), *((name, wait_ms) for name in waits)


def grpc_aio() -> ModuleType:
    """gRPC for asyncio, told to be silent."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    import grpc.aio

    return grpc.aio


def server_credentials(keys: Keys) -> Any:
    """A server's: it shows the key's certificate, and takes who shows the same."""
    import grpc

    pair = (keys.certificate_secret.encode(), keys.certificate.encode())
    return grpc.ssl_server_credentials([pair], root_certificates=pair[1], require_client_auth=True)


def member_credentials(keys: Keys) -> Any:
    """A member's: it shows the key's certificate, and takes who shows the same."""
    import grpc

    certificate = keys.certificate.encode()
    return grpc.ssl_channel_credentials(certificate, keys.certificate_secret.encode(), certificate)


def guarded(callback: Callable[..., T], otherwise: T) -> Callable[..., T]:
    """The same function, but where it fails that is logged, and the service goes on."""

    def call(*args: Any) -> T:
        try:
            return callback(*args)
        except Exception:
            # As text: the traceback itself would hold on to gRPC's objects, and with them to its thread.
            log.error("a callback of the health service failed\n%s", traceback.format_exc())
            return otherwise

    return call


class Loop:
    """The thread in which all of a process' health service runs: gRPC's queue of events is one for all loops of a process.

    It lives as long as somebody holds it.
    """

    _guard: ClassVar[threading.Lock] = threading.Lock()
    _shared: ClassVar[Loop | None] = None

    def __init__(self) -> None:
        self._holders = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._work, name="dtorch-health", daemon=True)
        self._thread.start()

    @classmethod
    def hold(cls) -> Loop:
        """The process' own, for somebody who will let go of it."""
        with cls._guard:
            # Of a process that this one was forked from, the thread did not come along.
            if cls._shared is None or not cls._shared._thread.is_alive():
                cls._shared = cls()
            cls._shared._holders += 1
            return cls._shared

    def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the last work of somebody, and end the thread if nobody else holds it."""
        if not self._thread.is_alive():
            work.close()
            return
        ending = self.begin(work)
        # A callback runs in this thread, and cannot wait for it.
        if threading.current_thread() is not self._thread:
            wait([ending], END_S)
        self.let_go()

    def let_go(self) -> None:
        """End the thread, if nobody else holds it."""
        with self._guard:
            self._holders -= 1
            if self._holders:
                return
            Loop._shared = None
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(END_S)
            # A connection that was cut short lies in cycles, and gRPC's own thread runs until the last of them is gone.
            gc.collect()

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run something in it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(_rest())
            self._loop.close()


async def _rest() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if left:
        # They are ending: cut short, they would leave connections open.
        _, left = await asyncio.wait(left, timeout=END_S / 10)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
