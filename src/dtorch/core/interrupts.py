"""Ctrl-C, and whatever else the handlers of signals raise, put off while something must not be left half done.

Python runs handlers in the main thread, between any two steps of a program.
"""

from __future__ import annotations

# ``signal`` itself spends ten times as long, on making enums of numbers, and this is done for every batch.
import _signal as signals
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar

NAMES = ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2")
SIGNALS = [int(getattr(signals, name)) for name in NAMES if hasattr(signals, name)]
"""Those that people handle by raising."""

ALARMS = {int(signals.SIGALRM)} if hasattr(signals, "SIGALRM") else set()
"""They come because something takes too long, so it is no use to wait for its end."""

HOLD, INSIST, ALLOW = range(3)

Handlers = list[tuple[int, Callable[[int, FrameType | None], Any]]]


class Held:
    """While entered, handlers wait: they run at the end, or within ``Allowed`` and ``Insisted``."""

    _current: ClassVar[Held | None] = None

    def __init__(self) -> None:
        self._handlers: Handlers = []
        self._came: list[tuple[int, FrameType | None]] = []
        self._mode = HOLD
        self._outer: Held | None = None

    def __enter__(self) -> None:
        if not _in_main_thread():
            return
        self._outer, Held._current = Held._current, self
        try:
            for number in SIGNALS:
                handler = signals.getsignal(number)
                if callable(handler):
                    self._handlers.append((number, handler))
                    signals.signal(number, self._take)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        if Held._current is self:
            Held._current = self._outer
            self._restore(dict(self._handlers), self._handlers)

    def become(self, mode: int) -> None:
        """Let handlers run, those that waited first; or wait for another signal of the kind; or wait."""
        self._mode = mode
        while self._mode == ALLOW and self._came:
            self._run(*self._came.pop(0))

    def _take(self, number: int, frame: FrameType | None) -> None:
        waiting = [one for one in self._came if one[0] == number]
        if self._mode == ALLOW or (self._mode == INSIST and (waiting or number in ALARMS)):
            self._came = [one for one in self._came if one[0] != number]
            self._run(number, frame)
        else:
            self._came.append((number, frame))

    def _run(self, number: int, frame: FrameType | None) -> None:
        # One that raises ends what was allowed.
        mode, self._mode = self._mode, HOLD
        dict(self._handlers)[number](number, frame)
        self._mode = mode

    def _restore(self, handlers: dict[int, Any], left: Handlers) -> None:
        """Each handler that is back may raise at once, and the others are to be back as well."""
        if left:
            number, handler = left.pop()
            try:
                signals.signal(number, handler)
            finally:
                self._restore(handlers, left)
            return
        while self._came:
            number, frame = self._came.pop(0)
            handlers[number](number, frame)


class Allowed:
    """Within ``Held``: what may be interrupted, such as a wait. What is interrupted is held again at once."""

    mode = ALLOW

    def __enter__(self) -> None:
        self._become(self.mode)

    def __exit__(self, *_: object) -> None:
        self._become(HOLD)

    def _become(self, mode: int) -> None:
        held = Held._current
        if held is not None and _in_main_thread():
            held.become(mode)


class Insisted(Allowed):
    """Within ``Held``: what had better come to its end, and is interrupted by an alarm or a second signal of the kind only."""

    mode = INSIST


def _in_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident
