"""One session of three worker processes for all tests of this folder: a sample of what ``make test-processes`` runs in full."""

from __future__ import annotations

from pathlib import Path

import pytest

import dtorch
from dtorch.tensor import client as clients
from dtorch.tensor.client import Client

# The devices of small meshes are on several workers, and no two workers have as many: 0; 1 and 2; 3 to 7.
HOSTED = {"cpu": [1, 2, 5]}

HERE = Path(__file__).parent

_session: Client | None = None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before the fixtures look what runs: a session, unless the one of the test before is still there."""
    global _session
    if _session is None or clients.running() is not _session:
        dtorch.shutdown()
        _session = dtorch.init(workers=3, devices=HOSTED)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """No test of another folder runs on it."""
    if nextitem is None or HERE not in nextitem.path.parents:
        dtorch.shutdown()
