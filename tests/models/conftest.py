"""The one real model: loaded once for the whole run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dtorch.demo.model import Loaded, load_model


@pytest.fixture(scope="session")
def smollm2() -> Iterator[Loaded]:
    """SmolLM2-135M-Instruct with real weights, on plain PyTorch; distribute a copy, not this one."""
    yield load_model()
