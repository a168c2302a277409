"""Whatever comes to the health service's port: it goes on, and keeps nothing of it."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import socket
from typing import Any

import pytest

from dtorch.cluster.beating import HealthMember
from dtorch.cluster.health import HealthServer
from dtorch.cluster.keys import Keys
from dtorch.cluster.membership import Beat, Joined, Lost
from dtorch.cluster.pulse import LARGEST_NBYTES, VERSION, Bye, Hello, Pulse, encode
from dtorch.cluster.rpc import MEMBER, METHOD, SERVICE, grpc_aio, member_credentials
from tests.cluster.mutations import mutated
from tests.cluster.peers import WAIT_S, Heard, await_true, member

KEYS = Keys.generate()
SETTINGS: dict[str, Any] = {"beat_s": 0.5, "dead_s": 10.0}
SEEDS = [encode(Hello(VERSION, member("fuzz"), 0)), encode(Pulse(0, Beat(operator="x", busy_s=0.5))), encode(Bye())]


@pytest.fixture
def changes() -> Heard:
    return Heard()


@pytest.fixture
def server(changes: Heard) -> Any:
    made = HealthServer(KEYS, on_event=changes, **SETTINGS)
    # It was there before all of it, and it still is afterwards.
    witness = HealthMember(KEYS, made.address, member("witness"), **SETTINGS)
    assert witness.await_answer(WAIT_S)
    yield made
    heard = next(s for s in made.standings() if s.member.name == "witness")
    last = heard.beat
    await_true(lambda: heard.beat is not last)
    newcomer = HealthMember(KEYS, made.address, member("newcomer"), **SETTINGS)
    assert newcomer.await_answer(WAIT_S)
    for one in (witness, newcomer, made):
        one.close()
    assert not [lost for lost in changes.of(Lost) if lost.member.name == "witness"]


def files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_garbage_on_the_bare_port(server: HealthServer, changes: Heard) -> None:
    chance, before = random.Random(0), files()
    host, _, port = server.address.rpartition(":")
    hello = bytes.fromhex("16030100f8010000f40303")  # how TLS begins
    http = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    for _ in range(10_000):
        start = chance.choice((b"", hello, http, b"GET / HTTP/1.1\r\n\r\n"))
        with socket.create_connection((host, int(port)), WAIT_S) as link:
            link.sendall(mutated(start + chance.randbytes(chance.choice((1, 16, 300))), chance) or b"x")
    assert [type(change) for change in changes.all] == [Joined]
    await_true(lambda: files() <= before + 4)


async def _send(address: str, frames: list[bytes]) -> None:
    """Send frames over as many connections as it takes, as somebody who has the key."""
    aio, left = grpc_aio(), list(frames)
    # As a member, but for the limits on what it sends.
    options = [option for option in MEMBER if "message_length" not in option[0]]
    async with aio.secure_channel(address, member_credentials(KEYS), options) as channel:
        while left:
            call = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
            try:
                for _ in range(min(50, len(left))):
                    await call.write(left.pop())
                await call.done_writing()
                async with asyncio.timeout(WAIT_S):
                    while await call.read() is not aio.EOF:
                        pass
            except (aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
                pass


def test_mutated_messages_of_somebody_with_the_key(server: HealthServer, changes: Heard) -> None:
    chance, before = random.Random(1), files()
    frames = [mutated(chance.choice(SEEDS), chance) for _ in range(100_000)]
    server._loop.begin(_send(server.address, frames)).result(WAIT_S)
    assert server.dropped["malformed"] > 1_000
    await_true(lambda: files() <= before + 4)


def test_messages_that_are_too_long(server: HealthServer) -> None:
    lengths = [LARGEST_NBYTES + 1, 2 * LARGEST_NBYTES, 100 * LARGEST_NBYTES, LARGEST_NBYTES + 1]
    for length in lengths:
        server._loop.begin(_send(server.address, [SEEDS[1], bytes(length), SEEDS[0]])).result(WAIT_S)
    assert server.dropped["oversized"] == 3 and server.dropped["broken off"] == len(lengths)
