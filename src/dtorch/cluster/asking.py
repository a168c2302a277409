"""Asking a controller how things are."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import msgspec

from ..core.errors import UsageError, four_parts
from ..observability.status import Status
from .keys import Keys
from .rpc import ASKING, SERVICE, STATUS, Loop, grpc_aio, member_credentials

ANSWER_S = 10.0
"""How long a controller may take to answer."""


class Question:
    """Asks the controller whose health service is at an address. Its owner calls ``close``."""

    def __init__(self, keys: Keys, address: str) -> None:
        self._aio, self._credentials, self._address = grpc_aio(), member_credentials(keys), address
        self._loop = Loop.hold()

    def ask(self) -> Status:
        """How things are now.

        Raises:
            UsageError: nobody answers who has the same key and speaks alike.
        """
        answer = self._loop.begin(self._ask()).result(2 * ANSWER_S)
        if isinstance(answer, bytes):
            try:
                return msgspec.msgpack.decode(answer, type=Status)
            except msgspec.DecodeError as error:
                answer = f"what cannot be read: {error}"
        host, _, port = self._address.rpartition(":")
        given = f"no status from the controller at {host}:{int(port) - 1}, but {answer}"
        rule, where = "a controller answers who has its key", "asking for its status"
        remedy = "start it (dtorch controller --listen HOST:PORT), and see that both use the same key file and version"
        raise UsageError(four_parts(given, rule, where, remedy))

    def close(self) -> None:
        """Let go of gRPC."""
        self._loop.let_go()

    async def _ask(self) -> bytes | str:
        channel = self._aio.secure_channel(self._address, self._credentials, ASKING)
        try:
            return await _called(channel)
        except self._aio.AioRpcError as error:
            # As text: the error itself would hold on to gRPC's objects.
            return f"{error.code().name}: {error.details()}"
        finally:
            await channel.close()


async def _called(channel: Any) -> bytes:
    answer: bytes = await channel.unary_unary(f"/{SERVICE}/{STATUS}")(b"", timeout=ANSWER_S)
    return answer


def ask(keys: Keys, address: str) -> Status:
    """The status of the controller whose health service is at an address.

    Raises:
        UsageError: see ``Question``.
    """
    with closing(Question(keys, address)) as question:
        return question.ask()
