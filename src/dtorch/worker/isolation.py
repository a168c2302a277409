"""Running a batch as if nothing of the client's surroundings existed.

An embedded worker runs in the client's thread, in the middle of whatever the client does: inside autocast, inference
mode, a torch function or dispatch mode. All of these have had their say when the client made the instruction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import Thread
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes, _len_torch_dispatch_stack


@contextmanager
def isolated(own_dtype: Callable[[], torch.dtype] = lambda: torch.float32) -> Iterator[None]:
    """No gradients, inference mode, autocast, torch function modes or dispatch modes inside, and a default dtype of its own.

    Args:
        own_dtype: the default dtype inside, which may change meanwhile.
    """
    outer = torch.get_default_dtype()
    if outer is not own_dtype():
        torch.set_default_dtype(own_dtype())
    try:
        with _no_modes():
            yield
    finally:
        # The whole process has one default dtype: what a client in another thread has set meanwhile stays.
        if torch.get_default_dtype() is own_dtype() is not outer:
            torch.set_default_dtype(outer)


@contextmanager
def _no_modes() -> Iterator[None]:
    fresh = torch._C._ForceDispatchKeyGuard(*_fresh_keys())
    with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad(), torch._C._DisableAutocast(), fresh:
        if not _len_torch_dispatch_stack():
            yield
            return
        with _disable_current_modes():
            yield


@cache
def _fresh_keys() -> tuple[Any, Any]:
    """The dispatch keys that a thread of its own includes and excludes."""
    found: list[Any] = []

    def look() -> None:
        found.extend((torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()))

    thread = Thread(target=look, name="dtorch-dispatch-keys")
    thread.start()
    thread.join()
    return found[0], found[1]
