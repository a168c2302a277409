"""Hosts on one machine: network namespaces with a name and an address each, behind a switch, on links that can be cut.

Who is not root has them in a user namespace. Nothing of them is seen outside, or outlives the test process.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0
"""For what surely comes: only a test that fails waits so long."""

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}
COMMAND = [sys.executable, "-c", "import sys; from dtorch.cli import main; sys.exit(main())"]

LINKS = [sys.executable, str(Path(__file__).with_name("host_links.py"))]
NEEDS = "tests of many hosts need Linux with `unshare` and `nsenter` (util-linux), and the right to make network namespaces"


class Network:
    """A switch, and the hosts at it. Its owner calls ``close``."""

    def __init__(self) -> None:
        missing = [tool for tool in ("unshare", "nsenter") if shutil.which(tool) is None]
        if missing:
            raise RuntimeError(f"{NEEDS}; {', '.join(missing)} cannot be found")
        self.user = [] if os.geteuid() == 0 else ["--user"]
        self.hosts: list[Host] = []
        self._switch = self._holder([*self.user, *(["--map-root-user"] if self.user else [])], [], "switch")
        self.within(self._switch, ["link", "add", {"ifname": "bridge", "kind": "bridge"}], _up("bridge"))

    def host(self, name: str) -> Host:
        """One more host."""
        entered = self.enter(self._switch.pid) if self.user else []
        host = Host(self, name, len(self.hosts) + 1, self._holder([], entered, name))
        self.hosts.append(host)
        port, there = f"port{host.number}", {"ifname": "eth0", "net_ns_pid": host.holder.pid}
        self.within(
            self._switch,
            ["link", "add", {"ifname": port, "kind": "veth", "peer": there}],
            ["link", "set", {"dev": port, "master": "bridge", "state": "up"}],
        )
        here = ["addr", "add", {"dev": "eth0", "address": host.address, "prefixlen": 24}]
        self.within(host.holder, _up("lo"), here, _up("eth0"))
        return host

    def link(self, number: int, state: str) -> None:
        """Set a host's link up or down."""
        self.within(self._switch, ["link", "set", {"dev": f"port{number}", "state": state}])

    def enter(self, holder: int) -> list[str]:
        """What a command begins with that is to run where a process is."""
        user = [*self.user, "--preserve-credentials"] if self.user else []
        return ["nsenter", "--target", str(holder), *user, "--net", "--uts"]

    def within(self, holder: subprocess.Popen[str], *calls: list[Any]) -> None:
        """Change the links and addresses that a process has."""
        lines = "".join(json.dumps(call) + "\n" for call in calls)
        command = [*self.enter(holder.pid), *LINKS]
        ran = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=WAIT_S)
        if ran.returncode:
            raise RuntimeError(f"{NEEDS}; {calls} failed: {ran.stderr.strip()}")

    def close(self) -> None:
        """End all that runs on the hosts, and the hosts."""
        for host in self.hosts:
            host.end()
        _let_go(self._switch)

    def _holder(self, options: list[str], entered: list[str], name: str) -> subprocess.Popen[str]:
        init = [sys.executable, "-S", "-E", str(Path(__file__).with_name("host_init.py")), name]
        command = [*entered, "unshare", *options, "--net", "--uts", *init]
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert holder.stdout is not None
        if holder.stdout.readline() != "ready\n":
            _let_go(holder)
            raise RuntimeError(f"{NEEDS}; unshare ended with {holder.returncode}")
        return holder


class Host:
    """A host.

    Attributes:
        address: that others reach it by.
        holder: its first process.
    """

    def __init__(self, network: Network, name: str, number: int, holder: subprocess.Popen[str]) -> None:
        self.network, self.name, self.number, self.holder = network, name, number, holder
        self.address = f"10.77.0.{number}"

    def start(self, arguments: Sequence[str], log: Path) -> psutil.Process:
        """Start a process that may outlive a test."""
        assert self.holder.stdin is not None and self.holder.stdout is not None
        self.holder.stdin.write(json.dumps([list(arguments), ENVIRONMENT, str(log)]) + "\n")
        self.holder.stdin.flush()
        return psutil.Process(int(self.holder.stdout.readline()))

    def enter(self) -> list[str]:
        """What a command begins with that is to run here."""
        return self.network.enter(self.holder.pid)

    def cut(self) -> None:
        """Cut its link: nobody is told."""
        self.network.link(self.number, "down")

    def heal(self) -> None:
        """Mend its link."""
        self.network.link(self.number, "up")

    def processes(self) -> list[psutil.Process]:
        """What runs here."""
        here = _namespace(self.holder.pid)
        return [p for p in psutil.process_iter() if p.pid != self.holder.pid and here and _namespace(p.pid) == here]

    def workers(self) -> list[psutil.Process]:
        """The workers that run here."""
        return [p for p in self.processes() if "dtorch.process" in _command(p)]

    def end(self) -> None:
        """End all that runs here, and the host."""
        for process in self.processes():
            process.kill()
        _let_go(self.holder)


def _up(link: str) -> list[Any]:
    return ["link", "set", {"dev": link, "state": "up"}]


def eventually(true: Callable[[], object], wait_s: float = WAIT_S) -> float:
    """Wait until something is true; returns the seconds that it took."""
    began_s = time.monotonic()
    while not true():
        took_s = time.monotonic() - began_s
        assert took_s < wait_s, f"not true within {wait_s:.0f} s"
        time.sleep(0.02)
    return time.monotonic() - began_s


def _namespace(process: int) -> str:
    try:
        return os.readlink(f"/proc/{process}/ns/net")
    except OSError:
        return ""


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _let_go(holder: subprocess.Popen[str]) -> None:
    assert holder.stdin is not None and holder.stdout is not None
    holder.stdin.close()
    holder.wait(WAIT_S)
    holder.stdout.close()
