"""What PyTorch and dtorch keep by thread or by process, carried over to a micro-batch and kept apart from the others'."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import overrides
from torch.utils import _python_dispatch

from ...tensor import defaults

AUTOCAST_DEVICES = ("cpu", "cuda")
_hooks: Any = torch._C._autograd


class Ambient:
    """The modes in force where this is made: gradients, inference, autocast, function and dispatch modes, hooks on saved
    tensors, and context variables.
    """

    def __init__(self) -> None:
        self.context = contextvars.copy_context()
        self.gradients = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.autocasts = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in AUTOCAST_DEVICES
            if torch.is_autocast_enabled(kind)
        ]
        self.function_modes = overrides._get_current_function_mode_stack()
        self.dispatch_modes = _python_dispatch._get_current_dispatch_mode_stack()
        self.saved_hooks = _hooks._top_saved_tensors_default_hooks(True)

    def run(self, fn: Callable[[], None]) -> None:
        """Call a function, on another thread, under these modes."""
        self.context.copy().run(self._run, fn)

    def _run(self, fn: Callable[[], None]) -> None:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.gradients))
            for kind, dtype, cache in self.autocasts:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=cache))
            if self.saved_hooks is not None:
                _hooks._push_saved_tensors_default_hooks(*self.saved_hooks)
                stack.callback(_hooks._pop_saved_tensors_default_hooks)
            # They are in force already, so they are put in place, not entered: entering may reset what they count.
            for function_mode in self.function_modes:
                overrides._push_mode(function_mode)
                stack.callback(overrides._pop_mode)
            for dispatch_mode in self.dispatch_modes:
                _python_dispatch._push_mode(dispatch_mode)
                stack.callback(_python_dispatch._pop_mode)
            fn()


@contextmanager
def without_autocast() -> Iterator[None]:
    """Backward passes run in the dtypes that the forward pass chose."""
    with ExitStack() as stack:
        for kind in AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


class Own:
    """A micro-batch's own share of what a process has once: the state of the random generators, and the stack of default
    meshes.

    Args:
        seed: of its random numbers.
        device_type: of the devices it runs on.
    """

    def __init__(self, seed: int, device_type: str) -> None:
        self.generators = [torch.default_generator, *(torch.cuda.default_generators if device_type == "cuda" else ())]
        self.states = [torch.Generator(g.device).manual_seed(seed).get_state() for g in self.generators]
        self.meshes = defaults.stacked_meshes()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let it be the process's inside, and keep what has become of it."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        before = [g.get_state() for g in self.generators]
        for generator, state in zip(self.generators, self.states, strict=True):
            generator.set_state(state)
        self.states = before
        self.meshes = defaults.exchange_meshes(self.meshes)
