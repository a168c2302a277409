"""Worker processes on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

START_S = 120.0
END_S = 10.0


class LocalProcesses:
    """Worker processes, one for each line that tells a worker what it is. Its owner calls ``end``."""

    def __init__(self, module: str) -> None:
        self._module = module
        self.directory = Path(tempfile.mkdtemp(prefix="dtorch-"))
        self.processes: list[subprocess.Popen[bytes]] = []

    @property
    def place(self) -> str:
        """A file through which the workers find each other."""
        return str(self.directory / "rendezvous")

    def start(self, task: msgspec.Struct) -> subprocess.Popen[bytes]:
        """Start one more."""
        # What this process can import, that one can: functions are pickled by the names of their modules.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
        command = [sys.executable, "-c", f"from {self._module} import main; main()"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(task) + b"\n")
        process.stdin.flush()
        self.processes.append(process)
        return process

    def end(self) -> None:
        """Wait for all to end, and end those that do not."""
        for process in self.processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdin is not None
            process.stdin.close()
        for left in self.directory.iterdir():
            left.unlink()
        self.directory.rmdir()
