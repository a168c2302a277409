"""The fixed, seeded part of the sweep that the tests run: a little of every operator.

``python -m tests.testing.opdb.part`` records it anew.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

RECORDED = Path(__file__).parent / "recorded.json"
PART = ("--samples", "2", "--combinations", "2", "--jobs", "2", "--limit", "300")


def sweep(*more: str) -> subprocess.CompletedProcess[str]:
    """Run the part in a process of its own, for PyTorch's test utilities change global state."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "dtorch.testing.opdb", *PART, "--out", out, *more]
        return subprocess.run(command, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    done = sweep("--record", str(RECORDED))
    print(done.stdout, done.stderr)
    sys.exit(done.returncode)
