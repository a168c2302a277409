"""Nothing has become worse since the sweep's fixed part was recorded."""

from __future__ import annotations

import pytest

from tests.testing.opdb.part import RECORDED, sweep


@pytest.mark.timeout(1200)
def test_no_operator_is_worse_than_recorded() -> None:
    done = sweep("--baseline", str(RECORDED))
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
