"""Messages of the health service: what is none is refused, whatever it is."""

from __future__ import annotations

import random

import msgspec
import pytest

from dtorch.cluster.membership import Beat, Member
from dtorch.cluster.pulse import (
    VERSION,
    Bye,
    Heard,
    Hello,
    OtherVersion,
    Pulse,
    Word,
    encode,
    read_hello,
    read_member,
    read_server,
)
from dtorch.core.errors import ProtocolError
from tests.cluster.mutations import mutated

MEMBER = Member(name="w0", role="worker", incarnation=1, host="h", pid=7, devices=("cpu:0", "cpu:2"))
BEAT = Beat(operator="aten::mm", instructions=9, memory_nbytes=2**40, busy_s=0.5)
FROM_MEMBERS = [Hello(VERSION, MEMBER, 3), Pulse(2**62, BEAT), Bye()]
FROM_SERVERS = [Heard(), Word(2**62, "end", "why")]


def test_what_is_sent_is_read() -> None:
    assert [read_member(encode(message)) for message in FROM_MEMBERS] == FROM_MEMBERS
    assert [read_server(encode(message)) for message in FROM_SERVERS] == FROM_SERVERS
    assert read_hello(encode(FROM_MEMBERS[0])) == FROM_MEMBERS[0]


@pytest.mark.parametrize("message", FROM_MEMBERS[1:])
def test_a_hello_comes_first(message: Pulse | Bye) -> None:
    with pytest.raises(ProtocolError):
        read_hello(encode(message))


def test_another_version_is_told_with_both() -> None:
    newer = {"type": "hello", "version": VERSION + 1, "something": ["new"]}
    with pytest.raises(OtherVersion, match=rf"version {VERSION + 1}[\s\S]*version {VERSION}") as caught:
        read_hello(msgspec.msgpack.encode(newer))
    assert "to do:" in str(caught.value)


def test_a_mutated_message_is_another_or_none() -> None:
    chance, refused = random.Random(0), 0
    for n in range(30_000):
        messages, read = ((FROM_MEMBERS, read_member), (FROM_SERVERS, read_server), (FROM_MEMBERS[:1], read_hello))[n % 3]
        frame = mutated(encode(chance.choice(messages)), chance)
        try:
            message = read(frame)
        except ProtocolError:
            refused += 1
        else:
            assert isinstance(message, Hello | Pulse | Bye | Heard | Word)
    assert refused > 10_000
