"""The first process of a host of ``network.py``: it starts what it is told to by lines of JSON, and ends all of it with itself.

It loads as little as it can, for there is one for each host.
"""

import json
import os
import select
import signal
import socket
import sys

LOGS: dict[int, str] = {}


def start(arguments: list[str], environment: dict[str, str], log: str) -> int:
    """Begin a process, whose number is returned."""
    process = os.fork()
    if process:
        LOGS[process] = log
        return process
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.execvpe(arguments[0], arguments, environment)


def reap() -> None:
    """Take leave of those that have ended."""
    while LOGS:
        process, status = os.waitpid(-1, os.WNOHANG)
        if not process:
            return
        with open(LOGS.pop(process), "a") as log:
            log.write(f"process {process} ended with {os.waitstatus_to_exitcode(status)}\n")


def main() -> None:
    """Work until the standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    socket.sethostname(sys.argv[1])
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([0], [], [], 0.05)
        reap()
        if ready:
            line = sys.stdin.buffer.raw.readline()
            if not line:
                return
            print(start(*json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
