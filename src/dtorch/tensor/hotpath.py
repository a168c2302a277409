"""What the hot path stands on: in C where that was built (``_fastpath.c``), else in Python (``purepath.py``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core.compiled import compiled

fastpath: Any = compiled("dtorch.tensor._fastpath")
"""The C module, or None. Its ``dispatch`` handles the calls with nothing to decide."""

if TYPE_CHECKING or fastpath is None:
    from .purepath import Known, Ready, Stream, Value
else:
    Known, Ready, Stream, Value = fastpath.Known, fastpath.Ready, fastpath.Stream, fastpath.Value

__all__ = ["Known", "Ready", "Stream", "Value", "fastpath"]
