"""``dtorch up``: a controller and agents on other hosts, for as long as this command runs."""

from __future__ import annotations

import os
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TextIO

from ..core.errors import UsageError, four_parts
from .description import Launch, launches, read
from .keys import Keys

END_S = 15.0
"""How long hosts may take to end."""

MOST_LINE_NBYTES = 1 << 16
"""A line of a host that is longer is printed in parts."""

FAILED = 1


def up(path: str, dry_run: bool = False) -> int:
    """Start the cluster that a file describes, and watch it until it ends; returns the exit code.

    Raises:
        UsageError: the file is wrong, or there is no key, or no ssh.
    """
    described = read(path)
    started = launches(described)
    if dry_run:
        for launch in started:
            print(shlex.join(launch.command))
        return 0
    key = None if described.key is None else Path(path).parent / Path(described.key).expanduser()
    return Watch(started, Keys.read(key), sys.stdout).run()


class Watch:
    """The commands of a cluster, each with its host's name in front of what it prints.

    Args:
        started: what to start.
        keys: given to each over its standard input, and to nobody else.
        out: where to print.
    """

    def __init__(self, started: Sequence[Launch], keys: Keys, out: TextIO) -> None:
        self._started, self._key, self._out = started, keys.as_line(), out
        self._selector = selectors.DefaultSelector()
        self._running: dict[subprocess.Popen[bytes], Launch] = {}
        self._told = False

    def run(self) -> int:
        """Start all, and end all when told to, when the controller has ended, or when no agent is left."""
        wake_in, wake_out = socket.socketpair()
        wake_in.setblocking(False)
        wake_out.setblocking(False)
        before = {number: signal.signal(number, self._tell) for number in (signal.SIGINT, signal.SIGTERM)}
        waking = signal.set_wakeup_fd(wake_out.fileno(), warn_on_full_buffer=False)
        self._selector.register(wake_in, selectors.EVENT_READ, None)
        try:
            for launch in self._started:
                self._start(launch)
            while self._is_whole() and not self._told:
                self._turn(None)
            return 0 if self._told else FAILED
        finally:
            self._end()
            signal.set_wakeup_fd(waking)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._selector.close()
            wake_in.close()
            wake_out.close()

    def _tell(self, number: int, frame: FrameType | None) -> None:
        self._told = True

    def _is_whole(self) -> bool:
        kinds = {launch.is_controller for launch in self._running.values()}
        return kinds == {True, False}

    def _start(self, launch: Launch) -> None:
        try:
            # Of its own group, for Ctrl-C is this command's to act on.
            process = subprocess.Popen(
                launch.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            given, rule = f"the command {launch.command[0]!r}: {error.strerror}", "hosts are reached by ssh"
            raise UsageError(four_parts(given, rule, "dtorch up", "install an OpenSSH client on this machine")) from error
        assert process.stdin is not None and process.stdout is not None
        self._running[process] = launch
        self._selector.register(process.stdout, selectors.EVENT_READ, (process, bytearray()))
        # Who has ended already says why by itself.
        with suppress(BrokenPipeError):
            process.stdin.write(self._key)
            process.stdin.flush()

    def _turn(self, timeout_s: float | None) -> None:
        """Wait for output or a signal, and print what there is."""
        for ready, _ in self._selector.select(timeout_s):
            if ready.data is None:
                os.read(ready.fd, 1 << 10)
                continue
            process, begun = ready.data
            came = os.read(ready.fd, 1 << 16)
            *lines, rest = (bytes(begun) + came).split(b"\n")
            if len(rest) > MOST_LINE_NBYTES or (rest and not came):
                lines, rest = [*lines, rest], b""
            begun[:] = rest
            for line in lines:
                self._print(process, line.decode(errors="replace"))
            if not came:
                self._ended(process)

    def _ended(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._selector.unregister(process.stdout)
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._print(process, f"ended with status {process.returncode}")
        process.stdout.close()
        del self._running[process]

    def _end(self) -> None:
        """Close what all are told through, which ends them, and kill what is late."""
        for process in self._running:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
        deadline_s = time.monotonic() + END_S
        while self._running and (left_s := deadline_s - time.monotonic()) > 0:
            self._turn(left_s)
        for process in list(self._running):
            # With what it has started, for that has its output too. Who has it all the same is not waited for.
            # Of a group that has ended but for being waited for, some systems say that it may not be killed.
            with suppress(PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            self._ended(process)

    def _print(self, process: subprocess.Popen[bytes], line: str) -> None:
        launch = self._running[process]
        name = f"{launch.host} (controller)" if launch.is_controller else launch.host
        print(f"[{name}] {line}", file=self._out, flush=True)
