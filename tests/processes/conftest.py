"""One session of three worker processes for all tests of this folder: a sample of what ``make test-processes`` runs in full."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import dtorch

# The devices of small meshes are on several workers, and no two workers have as many: 0; 1 and 2; 3 to 7.
HOSTED = {"cpu": [1, 2, 5]}


@pytest.fixture(scope="package", autouse=True)
def _on_processes() -> Iterator[None]:
    dtorch.shutdown()
    dtorch.init(workers=3, devices=HOSTED)
    yield
    dtorch.shutdown()
