"""A program on a host, told what to do bit by bit: the client in tests of many hosts."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.network import ENVIRONMENT, ROOT, WAIT_S, Host


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came of a piece of program.

    Attributes:
        value: of its variable ``result``, as JSON has it.
        error: its exception as text, with the name of its class; empty where there was none.
        took_s: how long it ran.
        at_s: when it ended, by the monotonic clock of the machine.
    """

    value: object
    error: str
    took_s: float
    at_s: float


class Console:
    """Such a program. Its owner calls ``end``."""

    def __init__(self, host: Host, key: Path, log: Path) -> None:
        command = [*host.enter(), sys.executable, "-m", "tests.cluster.console"]
        with log.open("a") as err:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
                cwd=ROOT,
                env={**ENVIRONMENT, "DTORCH_KEY": str(key)},
            )

    def run(self, source: str, wait_s: float = WAIT_S) -> object:
        """Run a piece that must not fail; returns its ``result``."""
        self.begin(source)
        answer = self.answer(wait_s)
        assert not answer.error, answer.error
        return answer.value

    def fail(self, source: str, wait_s: float = WAIT_S) -> Answer:
        """Run a piece that must fail."""
        self.begin(source)
        answer = self.answer(wait_s)
        assert answer.error
        return answer

    def begin(self, source: str) -> None:
        """Let it run a piece, and do not wait."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(source) + "\n")
        self.process.stdin.flush()

    def answer(self, wait_s: float = WAIT_S) -> Answer:
        """What came of it."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], wait_s)
        assert ready, f"no answer within {wait_s:.0f} s"
        return Answer(**json.loads(self.process.stdout.readline()))

    def end(self) -> None:
        """End it in order, or take leave of it where it was killed."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(WAIT_S)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


def main() -> None:
    """Run what comes, in one namespace."""
    namespace: dict[str, object] = {}
    for line in sys.stdin:
        namespace.pop("result", None)
        began_s, error = time.monotonic(), ""
        try:
            exec(json.loads(line), namespace)
        except Exception:
            error = traceback.format_exc()
        ended_s = time.monotonic()
        answer = {"value": namespace.get("result"), "error": error, "took_s": ended_s - began_s, "at_s": ended_s}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
