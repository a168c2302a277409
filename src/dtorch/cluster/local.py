"""The worker processes of this host: started, watched, and ended."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

import msgspec

from ..core.control import Task

END_S = 10.0
"""How long a worker may take to end before it is killed."""

WORKER = "dtorch.process"

MOST_FAILURES = 3
"""How often in a row a worker may end before it has come."""


def launch(module: str, task: msgspec.Struct, **options: object) -> subprocess.Popen[bytes]:
    """Start ``main`` of a module of dtorch in a process, told by a line of JSON on its standard input.

    Only the module and what it imports are loaded, and so not PyTorch where it does without.
    """
    folder = working_folder()
    # What this process can import, that one can: functions are pickled by the names of their modules.
    paths = [os.path.abspath(p) for p in sys.path if folder is not None or os.path.isabs(p)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    # PyTorch's libraries do not load in a folder that is gone.
    options["cwd"] = folder or os.sep
    process = subprocess.Popen([sys.executable, "-c", _boot(module)], stdin=subprocess.PIPE, env=environment, **options)  # type: ignore[call-overload]
    assert process.stdin is not None
    # One that has ended already is noticed as one that ends later.
    with suppress(BrokenPipeError):
        process.stdin.write(msgspec.json.encode(task) + b"\n")
        process.stdin.flush()
    return process


def working_folder() -> str | None:
    """Where this process works; None where that is gone."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _boot(module: str) -> str:
    root = str(Path(__file__).parents[1])
    if module == WORKER:
        return f"from {module} import main; main()"
    package = f"import sys, types; p = types.ModuleType('dtorch'); p.__path__ = [{root!r}]; sys.modules['dtorch'] = p"
    return f"{package}; from {module} import main; main()"


class LocalWorkers:
    """The workers of this host. One that ends is started anew; its name tells which time it is.

    Args:
        tasks: what each is told, less its name.
        name: of this host among the others.
        ended: called with the name of a worker, and how it ended.
    """

    def __init__(self, tasks: list[Task], name: str, ended: Callable[[str, str], None]) -> None:
        self._tasks, self._name, self._ended = tasks, name, ended
        self._times = [itertools.count() for _ in tasks]
        self._failures = [0] * len(tasks)
        self._names = [""] * len(tasks)
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * len(tasks)
        self._given_up = 0

    @property
    def count(self) -> int:
        """How many there are when all are there, less those that could not be started."""
        return len(self._tasks) - self._given_up

    def start(self) -> None:
        """Start all."""
        for place in range(len(self._tasks)):
            self._start(place)

    def reap(self) -> None:
        """Tell which have ended, and start them anew."""
        for place, process in enumerate(self._processes):
            if process is not None and process.poll() is not None:
                name, self._processes[place] = self._names[place], None
                let_go(process)
                if self._failures[place] < MOST_FAILURES:
                    self._start(place)
                else:
                    self._given_up += 1
                self._ended(name, how(process))

    def came(self, name: str) -> None:
        """A worker, if it is one of these, has started well."""
        if name in self._names:
            self._failures[self._names.index(name)] = 0

    def kill(self, name: str) -> None:
        """End a worker at once; it will be started anew. One that is not of this host is left to its own."""
        for process, own in zip(self._processes, self._names, strict=True):
            if own == name and process is not None:
                process.kill()

    @property
    def running(self) -> dict[str, int]:
        """Names and process numbers of all that run."""
        return {name: p.pid for p, name in zip(self._processes, self._names, strict=True) if p is not None}

    def end(self, told: Collection[str] = ()) -> None:
        """End all: those that were told to in some time, those that were not or are late at once."""
        deadline = time.monotonic() + END_S
        for name, process in zip(self._names, self._processes, strict=True):
            if process is None:
                continue
            try:
                process.wait(max(0.0, deadline - time.monotonic()) if name in told else 0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            let_go(process)
        self._processes = [None] * len(self._tasks)

    def _start(self, place: int) -> None:
        name = f"{self._name}.{place}.{next(self._times[place])}"
        task = msgspec.structs.replace(self._tasks[place], name=name)
        self._names[place] = name
        self._failures[place] += 1
        self._processes[place] = launch(WORKER, task)


def let_go(process: subprocess.Popen[bytes]) -> None:
    """Close what a process that has ended was told through."""
    assert process.stdin is not None
    # What it was to be told may not have been read.
    with suppress(BrokenPipeError):
        process.stdin.close()


def how(process: subprocess.Popen[bytes]) -> str:
    """How a process has ended, for people."""
    code = process.returncode
    return f"was ended by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with status {code}"
