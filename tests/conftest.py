"""Every test starts seeded and leaves no thread and no child process behind."""

from __future__ import annotations

import os

# Before transformers is imported: no test may reach for the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import random
from collections.abc import Iterator

import hypothesis
import numpy as np
import pytest
import torch
import tqdm

import dtorch
from dtorch.tensor import client as clients
from tests.leaks import leaks, running

torch.set_num_threads(1)
# A monitor thread would outlive the first progress bar for the rest of the run.
tqdm.tqdm.monitor_interval = 0
# Wall-clock deadlines fail on a busy machine, and a random example that failed once is not found again.
hypothesis.settings.register_profile("dtorch", deadline=None, derandomize=True)
hypothesis.settings.load_profile("dtorch")


@pytest.fixture(autouse=True, scope="session")
def _shutdown_leaves_nothing_running() -> Iterator[None]:
    before = running()
    yield
    dtorch.shutdown()
    left = leaks(before)
    assert not left, f"after dtorch.shutdown() there still runs: {', '.join(left)}"


@pytest.fixture(autouse=True)
def _leaves_nothing_running() -> Iterator[None]:
    # Worker processes serve many tests. A session that a test starts is its own, and ends with it.
    session = dtorch.session() if os.environ.get("DTORCH_WORKERS") else None
    before = running()
    yield
    if session is not None and clients.running() is not session:
        dtorch.shutdown()
    left = leaks(before)
    assert not left, f"the test left running: {', '.join(left)}; its owner must close it"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
