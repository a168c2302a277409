"""Running a batch as if nothing of the client's surroundings existed.

An embedded worker runs in the client's thread, in the middle of whatever the client does: inside autocast, inference
mode, a torch function or dispatch mode. All of these have had their say when the client made the instruction.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes, _len_torch_dispatch_stack


@contextmanager
def isolated(default_dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """No gradients, inference mode, autocast, torch function modes or dispatch modes inside, and a default dtype of its own."""
    outer = torch.get_default_dtype()
    if outer is not default_dtype:
        torch.set_default_dtype(default_dtype)
    try:
        with _no_modes():
            yield
    finally:
        if torch.get_default_dtype() is not outer:
            torch.set_default_dtype(outer)


@contextmanager
def _no_modes() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad(), torch._C._DisableAutocast():
        if not _len_torch_dispatch_stack():
            yield
            return
        with _disable_current_modes():
            yield
