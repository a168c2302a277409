"""Batches and replies as frames of bytes: one msgpack frame, then the raw bytes of each tensor.

Every message starts with the vocabulary's version, which is checked before anything else is read. A long msgpack frame may
come compressed: calls of one batch are much alike.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import msgpack
from torch import Tensor

from ..core.errors import InternalError, ProtocolError, four_parts
from ..core.program import VERSION, Const, DefinePlan, Instruction, Local, PendingReply, Reply, Scalar, Slot, Vary
from .base import Transport
from .frames import Frame, TensorHeader, from_frame, to_frame

_TENSOR, _COMPLEX, _BIG_INT = 1, 2, 3
_ARGUMENTS = {"slot": Slot, "scalar": Scalar, "vary": Vary, "const": Const}

WORTH_NBYTES = 4 << 10
"""A shorter frame is sent as it is."""

MOST_INFLATED_NBYTES = 1 << 30

_DEFLATED = zlib.compress(b"")[0]

Envelope = tuple[int, int, msgspec.Raw]


def encode_batch(first: int, batch: list[Instruction]) -> list[Frame]:
    """Frames of a batch whose first Call or Draw has sequence number ``first``."""
    return _encode(first, batch)


def decode_batch(frames: Sequence[Frame]) -> tuple[int, list[Instruction]]:
    """The sequence number and the batch.

    Raises:
        ProtocolError: the sender speaks another version, or the frames are no batch.
    """
    first, batch = _decode(frames, list[Instruction])
    return first, [_revive(i) for i in batch]


def encode_reply(reply: Reply) -> list[Frame]:
    """Frames of a reply."""
    return _encode(0, reply)


def decode_reply(frames: Sequence[Frame]) -> Reply:
    """The reply.

    Raises:
        ProtocolError: the sender speaks another version, or the frames are no reply.
    """
    return _decode(frames, Reply)[1]


def deflated(frame: Frame) -> Frame:
    """A msgpack frame as it is to travel: one that would not be inflated again is left as it is."""
    return zlib.compress(frame, 1) if WORTH_NBYTES <= len(frame) <= MOST_INFLATED_NBYTES else frame


def inflated(frame: Frame) -> Frame:
    """A msgpack frame as it was before ``deflated``.

    Raises:
        ProtocolError: it was never one.
    """
    # Every envelope begins with the byte of an array of three, never with this one.
    if not len(frame) or frame[0] != _DEFLATED:
        return frame
    try:
        stream = zlib.decompressobj()
        plain = stream.decompress(frame, MOST_INFLATED_NBYTES)
    except zlib.error as error:
        raise _unlike(f"a frame that cannot be inflated: {error}") from error
    if not stream.eof:
        raise _unlike(f"a frame that is cut short, or of more than {MOST_INFLATED_NBYTES} bytes")
    return plain


class EncodedTransport:
    """Another transport behind encoding and decoding, as if every batch and reply crossed a socket."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    def submit(self, first: int, batch: list[Instruction]) -> None:
        """Send a batch."""
        self._inner.submit(*decode_batch(encode_batch(first, batch)))

    def request(self, first: int, batch: list[Instruction]) -> PendingReply:
        """Send a batch whose last instruction is answered."""
        return _Decoded(self._inner.request(*decode_batch(encode_batch(first, batch))))

    def close(self) -> None:
        """Close the inner transport."""
        self._inner.close()


class _Decoded:
    """A pending reply that crosses the wire when it is taken."""

    def __init__(self, inner: PendingReply) -> None:
        self._inner = inner

    def done(self) -> bool:
        return self._inner.done()

    def result(self, timeout: float | None = None) -> Reply:
        return decode_reply(encode_reply(self._inner.result(timeout)))

    def add_done_callback(self, fn: Any) -> None:
        self._inner.add_done_callback(lambda _: fn(self))


def _encode(first: int, body: Any) -> list[Frame]:
    frames: list[Frame] = [b""]

    def extend(value: Any) -> msgpack.Ext:
        if isinstance(value, Tensor):
            header, data = to_frame(value, len(frames))
            frames.append(data)
            return msgpack.Ext(_TENSOR, msgpack.encode(header))
        if isinstance(value, complex):
            return msgpack.Ext(_COMPLEX, struct.pack("<dd", value.real, value.imag))
        if callable(value):
            raise InternalError(f"{value!r} was not made ready to travel")
        raise TypeError(f"{value!r} of type {type(value).__name__} cannot be sent")

    message = (VERSION, first, body)
    try:
        frames[0] = msgpack.encode(message, enc_hook=extend)
    except OverflowError:
        # msgpack ends at 64 bits. Such ints are rare, so only a batch that has one pays for looking.
        del frames[1:]
        frames[0] = msgpack.encode((VERSION, first, _without_big_ints(body)), enc_hook=extend)
    return frames


def _decode(frames: Sequence[Frame], kind: Any) -> tuple[int, Any]:
    def restore(code: int, data: memoryview) -> Any:
        if code == _TENSOR:
            header = msgpack.decode(data, type=TensorHeader)
            return from_frame(header, frames[header.frame])
        if code == _COMPLEX:
            return complex(*struct.unpack("<dd", data))
        if code == _BIG_INT:
            return int(bytes(data), 16)
        raise ProtocolError(f"unknown extension {code} in a message")

    try:
        version, first, body = msgpack.decode(inflated(frames[0]), type=Envelope)
        _check_version(version)
        return first, msgpack.decode(body, type=kind, ext_hook=restore)
    except (msgspec.DecodeError, IndexError, RecursionError) as error:
        raise _unlike(f"a message of {len(frames)} frames that cannot be read: {error}") from error


def _check_version(version: int) -> None:
    if version != VERSION:
        raise _unlike(f"a message of version {version}")


def _unlike(given: str) -> ProtocolError:
    rule = f"both sides speak version {VERSION} of the instructions"
    return ProtocolError(four_parts(given, rule, "between client and worker", "install the same dtorch everywhere"))


def _revive(instruction: Instruction) -> Instruction:
    """Local arguments are of any type, so those that are structs arrive as tagged dicts."""
    if not isinstance(instruction, DefinePlan):
        return instruction
    steps = [
        msgspec.structs.replace(s, args=_argument(s.args), kwargs={k: _argument(v) for k, v in s.kwargs.items()})
        if isinstance(s, Local)
        else s
        for s in instruction.steps
    ]
    return msgspec.structs.replace(instruction, steps=steps)


def _argument(value: Any) -> Any:
    if isinstance(value, list):
        return [_argument(v) for v in value]
    if not isinstance(value, dict):
        return value
    fields = {k: _argument(v) for k, v in value.items() if k != "type"}
    return _ARGUMENTS[value["type"]](**fields)


def _without_big_ints(tree: Any) -> Any:
    """A copy with every int beyond 64 bits as an extension."""
    if isinstance(tree, int) and not -(2**63) <= tree < 2**64:
        return msgpack.Ext(_BIG_INT, hex(tree).encode())
    if isinstance(tree, list | tuple):
        return [_without_big_ints(v) for v in tree]
    if isinstance(tree, dict):
        return {k: _without_big_ints(v) for k, v in tree.items()}
    if isinstance(tree, msgspec.Struct):
        return msgspec.structs.replace(tree, **{f: _without_big_ints(getattr(tree, f)) for f in tree.__struct_fields__})
    return tree
