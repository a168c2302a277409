"""Messages as frames on authenticated, encrypted sockets: what clients, relays and workers have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

# What is sent without a copy needs it to the end, and it ends at exit: with the first such message it would come too late to
# end after a session.
import zmq.utils.garbage
from msgspec import msgpack
from zmq.auth.thread import ThreadAuthenticator

from ..core.control import Head
from ..core.errors import ProtocolError

LINGER_MS = 1000
"""How long a socket that is closed tries to send what is left."""

MOST_NBYTES = 16 << 30
"""Largest frame that is taken."""

MOST_HEAD_NBYTES = 1 << 20
"""Largest head, and largest control message."""

KEPT_ALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 10,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 4,
    zmq.TCP_MAXRT: 30_000,
}
"""What a socket over TCP is told about the other end, in seconds, and for what is under way in milliseconds."""

_HEAD = msgpack.Decoder(Head)


@dataclass(frozen=True, slots=True)
class Key:
    """What lets into a session: the listening side's public key, and the pair that all others share."""

    hub_public: bytes
    member_public: bytes
    member_secret: bytes


@dataclass(frozen=True, slots=True)
class Lock:
    """What a listening socket needs: its own secret key beside the key of those that it lets in."""

    key: Key
    secret: bytes


class Gate:
    """Lets those into the listening sockets of a context who have the key, and nobody else."""

    def __init__(self, context: zmq.Context, lock: Lock) -> None:
        self._lock, self._context = lock, context
        self._thread = ThreadAuthenticator(context)
        self._thread.start()
        self._thread.configure_curve_callback(credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a public key is let in."""
        return key == self._lock.key.member_public

    def listen(self, address: str, most_nbytes: int = MOST_NBYTES) -> zmq.Socket:
        """A socket to which others connect by name, and send no larger frames."""
        socket = _socket(self._context, zmq.ROUTER)
        # What is set after ``bind`` does not hold for who connects there.
        socket.set(zmq.MAXMSGSIZE, most_nbytes)
        socket.set(zmq.ROUTER_MANDATORY, 1)
        # Who comes back under the same name takes the place of what is left of before.
        socket.set(zmq.ROUTER_HANDOVER, 1)
        socket.curve_server, socket.curve_secretkey, socket.curve_publickey = True, self._lock.secret, self._lock.key.hub_public
        socket.bind(address)
        return socket

    def close(self) -> None:
        """End its thread."""
        self._thread.stop()


def connect(context: zmq.Context, address: str, name: str, key: Key) -> zmq.Socket:
    """A socket that speaks to a listening one under a name."""
    socket = _socket(context, zmq.DEALER)
    socket.identity = name.encode()
    socket.curve_serverkey = key.hub_public
    socket.curve_publickey, socket.curve_secretkey = key.member_public, key.member_secret
    socket.connect(address)
    return socket


def headed(head: Head, body: Any = None) -> list[bytes]:
    """The frames of a message other than a batch or a reply."""
    return [msgpack.encode(head)] if body is None else [msgpack.encode(head), msgpack.encode(body)]


def parsed(frame: Any) -> Head:
    """The head of a message.

    Raises:
        ProtocolError: it is none.
    """
    return _read(frame, _HEAD)


def body(frames: Sequence[Any], kind: Any) -> Any:
    """The struct of a message that has one.

    Raises:
        ProtocolError: it has none.
    """
    if len(frames) != 2:
        raise ProtocolError(f"a message of {len(frames)} frames where two are due")
    return _read(frames[1], msgpack.Decoder(kind))


def _read(frame: Any, decoder: Any) -> Any:
    view = frame.buffer if isinstance(frame, zmq.Frame) else frame
    if len(view) > MOST_HEAD_NBYTES:
        raise ProtocolError(f"a head of {len(view)} bytes")
    try:
        return decoder.decode(view)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"a message that cannot be read: {error}") from error


def _socket(context: zmq.Context, kind: int) -> zmq.Socket:
    socket = context.socket(kind)
    socket.set(zmq.LINGER, LINGER_MS)
    socket.set(zmq.MAXMSGSIZE, MOST_NBYTES)
    # What is under way is bounded by credits: a socket that dropped or blocked at a number of messages would break that.
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    # The kernel takes leave of machines that are no longer there: who is merely stopped still answers it.
    for option, value in KEPT_ALIVE.items():
        socket.set(option, value)
    return socket
