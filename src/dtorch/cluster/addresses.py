"""What people write for controllers and devices, and what hosts are reached by."""

from __future__ import annotations

import re
import socket

from ..core.errors import UsageError, four_parts

PORT = 7717
"""Where a controller listens that is not told. Its health service listens at the next port."""


def ports(text: str) -> tuple[str, str]:
    """The address of a controller and that of its health service, of ``HOST:PORT`` or ``HOST``.

    Raises:
        UsageError: it is neither.
    """
    match = re.fullmatch(r"(?:tcp://)?([^:/\s\[\]]+)(?::(\d{1,5}))?/?", text)
    port = int(match[2] or PORT) if match else 0
    if match is None or not 0 < port < 65535:
        rule = f"a controller is named by HOST:PORT, reached over IPv4; it uses PORT ({PORT} when left out) and the next one"
        raise UsageError(four_parts(f"the address {text!r}", rule, "the controller's address", "give e.g. 10.0.0.1:7717"))
    return f"tcp://{match[1]}:{port}", f"{match[1]}:{port + 1}"


def devices(text: str) -> list[dict[str, int]]:
    """The devices of each worker of a host, of e.g. ``cpu:8``: one worker each.

    Raises:
        UsageError: it says something else.
    """
    match = re.fullmatch(r"cpu:(\d{1,4})", text)
    if match is None or not int(match[1]):
        rule, where = "a host has CPU devices, one worker process each", "dtorch agent --devices"
        raise UsageError(four_parts(f"devices {text!r}", rule, where, "give e.g. cpu:8; worker processes on CUDA come later"))
    return [{"cpu": 1}] * int(match[1])


def reached_by(other: str) -> str:
    """The address of this host on the way to another, which is given as ``HOST:PORT``.

    Raises:
        UsageError: no such host is known, or there is no way to it.
    """
    host, _, port = other.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Nothing is sent.
            probe.connect((host, int(port)))
        except OSError as error:
            rule, where = "an agent reaches its controller over IPv4", "dtorch agent --controller"
            remedy = "give a name or an address that this host knows"
            raise UsageError(four_parts(f"the controller {host!r}: {error.strerror}", rule, where, remedy)) from error
        return str(probe.getsockname()[0])
