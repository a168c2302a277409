"""How two workers of one host find each other."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

from .peers import PeerLost
from .shared import SharedPair, new_memory

POLL_S = 0.001
SECRET_NBYTES = 16
HELLO_S = 10.0
"""How long one that has connected may take to say who it is."""


class Door:
    """Where the other workers of this host knock.

    Its socket has no file, and only this user's processes that know the secret are let in.

    Attributes:
        sign: what others need to know to knock.
    """

    def __init__(self, me: int) -> None:
        self._me = me
        self._secret = secrets.token_bytes(SECRET_NBYTES)
        self._here = host()
        self._came: dict[int, tuple[socket.socket, int]] = {}
        self._socket: socket.socket | None = None
        name = ""
        if self._here:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            name = f"dtorch-{secrets.token_hex(SECRET_NBYTES)}"
            self._socket.bind(f"\0{name}")
            self._socket.listen(socket.SOMAXCONN)
            self._socket.settimeout(POLL_S)
        self.sign = f"{self._here} {name} {self._secret.hex()}"

    def pair(self, peer: int, sign: str, timeout_s: float, broken: Callable[[], bool]) -> SharedPair | None:
        """Meet another worker, whose door has this sign; None where it is on another host.

        Raises:
            PeerLost: it does not come, or is not waited for any more.
        """
        here, name, secret = sign.split(" ")
        if not here or here != self._here:
            return None
        if self._me < peer:
            return self._knock(peer, name, bytes.fromhex(secret))
        deadline = time.monotonic() + timeout_s
        while peer not in self._came:
            if broken() or time.monotonic() > deadline:
                raise PeerLost(peer)
            self._open()
        return SharedPair(*self._came.pop(peer), first=False)

    def close(self) -> None:
        """Let nobody in any more."""
        for link, memory in self._came.values():
            link.close()
            os.close(memory)
        self._came.clear()
        if self._socket is not None:
            self._socket.close()

    def _knock(self, peer: int, name: str, secret: bytes) -> SharedPair:
        link, memory = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), new_memory()
        try:
            link.connect(f"\0{name}")
            socket.send_fds(link, [secret + struct.pack("!I", self._me)], [memory])
        except OSError as error:
            link.close()
            os.close(memory)
            raise PeerLost(peer) from error
        return SharedPair(link, memory, first=True)

    def _open(self) -> None:
        """Let in who has come, if anyone has and is known."""
        assert self._socket is not None
        try:
            link, _ = self._socket.accept()
        except TimeoutError:
            return
        # Before anything is read: whom the kernel tells to be somebody else could keep this worker waiting.
        if not _same_user(link):
            link.close()
            return
        link.settimeout(HELLO_S)
        try:
            said, memory, *_ = socket.recv_fds(link, SECRET_NBYTES + 4, 1)
        except OSError:
            said, memory = b"", []
        known = hmac.compare_digest(said[:SECRET_NBYTES], self._secret)
        if known and len(memory) == 1 and len(said) == SECRET_NBYTES + 4:
            self._came[struct.unpack("!I", said[SECRET_NBYTES:])[0]] = link, memory[0]
            return
        link.close()
        for fd in memory:
            os.close(fd)


def _same_user(link: socket.socket) -> bool:
    _, user, _ = struct.unpack("iII", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII")))
    return user == os.getuid()


def host() -> str:
    """What workers that can share memory have in common; empty where none can."""
    if sys.platform != "linux":
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}-{os.stat('/proc/self/ns/net').st_ino}"
