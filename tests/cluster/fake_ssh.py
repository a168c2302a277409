"""Stands in for ``ssh``: runs the command on this machine, and notes how it was called."""

import json
import os
import sys
from pathlib import Path


def main() -> None:
    """As ``ssh [options] host command`` does."""
    arguments = sys.argv[1:]
    with Path(os.environ["FAKE_SSH_LOG"]).open("a") as log:
        log.write(json.dumps(arguments) + "\n")
    os.execvp("sh", ["sh", "-c", arguments[-1]])


if __name__ == "__main__":
    main()
