"""What ``dtorch up`` is told: the hosts of a cluster as a YAML file, and what is to run on each."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ..core.errors import UsageError, four_parts
from .addresses import PORT, devices

# What begins with a hyphen would be an option to ssh.
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:%-]*$")]
Text = Annotated[str, msgspec.Meta(min_length=1)]

SSH = [
    "ssh",
    "-T",
    "-o",
    "BatchMode=yes",
    "-o",
    "ConnectTimeout=20",
    "-o",
    "ServerAliveInterval=5",
    "-o",
    "ServerAliveCountMax=3",
]
"""Nobody can answer several questions at once; and a host that is no longer there is noticed."""


class HostEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A host that differs from the others; what is left out is that of the file.

    Attributes:
        host: as ssh knows it.
        user: to log in as; ssh's own choice when omitted.
        python: an interpreter there that has dtorch.
        ssh: further options of ssh.
        devices: see ``dtorch agent --devices``.
        address: what other hosts reach it by, where that is not how it reaches the controller.
    """

    host: Name
    user: Name | None = None
    python: Text | None = None
    ssh: list[str] | None = None
    devices: str | None = None
    address: Name | None = None


class ClusterFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file.

    Attributes:
        hosts: with an agent each.
        controller: the host where the controller runs, which need not be one of them; the first of them when omitted.
        reached: the controller's address as the agents know it; the host's name when omitted.
        listen: the address at which it listens there.
        port: of the controller; its health service takes the next.
        key: the cluster's key on this machine, beside the file; what ``DTORCH_KEY`` says, else ``~/.dtorch/key`` when omitted.
    """

    hosts: Annotated[list[Name | HostEntry], msgspec.Meta(min_length=1)]
    controller: Name | HostEntry | None = None
    reached: Name | None = None
    listen: Name = "0.0.0.0"
    port: Annotated[int, msgspec.Meta(ge=1, lt=65535)] = PORT
    key: Text | None = None
    user: Name | None = None
    python: Text = "python3"
    ssh: list[str] = []
    devices: str | None = None


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A command that runs on a host for as long as its standard input is open, of which the first line is the key.

    Attributes:
        host: for people.
        is_controller: the others are agents.
    """

    host: str
    is_controller: bool
    command: Sequence[str]


def read(path: str | os.PathLike[str]) -> ClusterFile:
    """The description in a file.

    Raises:
        UsageError: there is none, or it is wrong; the text names file and field.
    """
    try:
        described: ClusterFile = msgspec.yaml.decode(Path(path).read_bytes(), type=ClusterFile)
        for number, entry in enumerate(described.hosts):
            _check_devices(entry, f"hosts[{number}].devices")
        _check_devices(described, "devices")
    except OSError as error:
        raise _wrong(path, str(error.strerror), "the path") from error
    except (msgspec.DecodeError, ValueError) as error:
        what, _, field = str(error).partition(" - at `")
        raise _wrong(path, what, f"the field {field.strip('`')}" if field else "the file as a whole") from error
    return described


def launches(described: ClusterFile) -> list[Launch]:
    """What is to be started: the controller, and then the agents."""
    head = described.controller or described.hosts[0]
    name = head if isinstance(head, str) else head.host
    at = f"{described.reached or name}:{described.port}"
    started = [_launch(described, head, ["controller", "--listen", f"{described.listen}:{described.port}"])]
    for entry in described.hosts:
        words, address = ["agent", "--controller", at], None if isinstance(entry, str) else entry.address
        wanted = _of(described, entry, "devices")
        words += ["--devices", wanted] if wanted else []
        words += ["--address", address] if address else []
        started.append(_launch(described, entry, words))
    return started


def _launch(described: ClusterFile, entry: str | HostEntry, words: list[str]) -> Launch:
    host, user = entry if isinstance(entry, str) else entry.host, _of(described, entry, "user")
    remote = f"{_program(_of(described, entry, 'python'))} {shlex.join(['-m', 'dtorch', *words, '--key', '-'])}"
    ssh = [*SSH, *_of(described, entry, "ssh"), f"{user}@{host}" if user else host, f"exec {remote}"]
    return Launch(host=host, is_controller=words[0] == "controller", command=ssh)


def _program(path: str) -> str:
    """A path for the shell of a host, which knows what home is there."""
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)


def _of(described: ClusterFile, entry: str | HostEntry, field: str) -> Any:
    own = None if isinstance(entry, str) else getattr(entry, field)
    return getattr(described, field) if own is None else own


def _check_devices(given: str | HostEntry | ClusterFile, field: str) -> None:
    if not isinstance(given, str) and given.devices is not None:
        try:
            devices(given.devices)
        except UsageError as error:
            raise ValueError(f"{str(error).splitlines()[0]} - at `$.{field}`") from error


def _wrong(path: str | os.PathLike[str], what: str, where: str) -> UsageError:
    rule = "a cluster is described by a YAML file with hosts:, and optionally controller:, port:, key:, user:, python:, ..."
    return UsageError(four_parts(f"the file {str(path)!r}: {what}", rule, where, "mend it; docs/clusters.md has an example"))
