"""What members and the health service say to each other: all of its vocabulary, as msgpack. Data only."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import msgpack

from ..core.errors import ProtocolError, four_parts
from .membership import Beat, Member

VERSION = 2

LARGEST_NBYTES = 64 * 1024
"""A longer message is not taken."""


class Hello(msgspec.Struct, frozen=True, tag="hello", forbid_unknown_fields=True):
    """The first of a member on a connection.

    Attributes:
        heard: number of the last word that it got.
    """

    version: int
    member: Member
    heard: int


class Pulse(msgspec.Struct, frozen=True, tag="pulse", forbid_unknown_fields=True):
    """A member lives."""

    heard: int
    beat: Beat


class Bye(msgspec.Struct, frozen=True, tag="bye", forbid_unknown_fields=True):
    """A member ends."""


class Heard(msgspec.Struct, frozen=True, tag="heard", forbid_unknown_fields=True):
    """The answer to each pulse, so that members know that the service lives."""


class Word(msgspec.Struct, frozen=True, tag="word", forbid_unknown_fields=True):
    """Something for a member to do; repeated on new connections until it was heard."""

    number: int
    text: Annotated[str, msgspec.Meta(max_length=256)]
    detail: Annotated[str, msgspec.Meta(max_length=8192)] = ""


class OtherVersion(ProtocolError):
    """A member speaks another version."""


REFUSED = "refused"
"""Text of the word that ends a member's part in the cluster; the detail says why."""

_MEMBERS, _SERVERS = msgpack.Decoder(Hello | Pulse | Bye), msgpack.Decoder(Heard | Word)


class _Version(msgspec.Struct, tag="hello"):
    """Of a hello of another version, all that can be read."""

    version: int


_VERSIONS = msgpack.Decoder(_Version)

encode = msgpack.Encoder().encode


def read_hello(frame: bytes) -> Hello:
    """The first message of a member.

    Raises:
        ProtocolError: it is none, or of another version.
    """
    version = _read(_VERSIONS, frame).version
    if version != VERSION:
        rule = f"both sides speak version {VERSION} of the health service"
        where, remedy = "between a member and the health service", "install the same dtorch everywhere"
        raise OtherVersion(four_parts(f"a member of version {version}", rule, where, remedy))
    hello = _read(_MEMBERS, frame)
    assert isinstance(hello, Hello)
    return hello


def read_member(frame: bytes) -> Hello | Pulse | Bye:
    """A message of a member.

    Raises:
        ProtocolError: it is none.
    """
    return _read(_MEMBERS, frame)


def read_server(frame: bytes) -> Heard | Word:
    """A message of the service.

    Raises:
        ProtocolError: it is none.
    """
    return _read(_SERVERS, frame)


def _read(decoder: Any, frame: bytes) -> Any:
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a message of {len(frame)} bytes that cannot be read: {error}") from error
