"""``Coroutine``: a function that can stop in the middle of whatever it calls, and be gone on with later.

It has a thread to keep its stack, but no concurrency: it runs only while ``resume`` waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Unwound(BaseException):
    """Raised where a coroutine stopped, to end it; no ``except Exception`` in between keeps it."""


class Coroutine:
    """A function on hold; ``close`` it, or run it to its end.

    Args:
        body: the function. It calls ``pause`` to stop.
    """

    def __init__(self, body: Callable[[], None]) -> None:
        self.done = False
        self.error: BaseException | None = None
        self._closing = False
        self._go: SimpleQueue[bool] = SimpleQueue()
        self._back: SimpleQueue[None] = SimpleQueue()
        # A second interrupt may come while close() waits; the thread ends with the process then.
        self._thread = threading.Thread(target=self._main, args=(body,), name="dtorch-micro-batch", daemon=True)

    def resume(self) -> None:
        """Run until the next ``pause`` or the end; raises what the function raised."""
        if self._thread.ident is None:
            self._thread.start()
        self._go.put(True)
        self._back.get()
        if self.done:
            self._thread.join()
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def pause(self) -> None:
        """Stop until resumed; called from within."""
        if not self._closing:
            self._back.put(None)
            self._closing = not self._go.get()
        if self._closing:
            raise Unwound

    def close(self) -> None:
        """End it where it stopped, and wait until its stack is unwound. If it runs still, it ends at its next ``pause``."""
        self._go.put(False)
        if self._thread.ident is not None:
            self._thread.join()

    def _main(self, body: Callable[[], None]) -> None:
        try:
            if self._go.get():
                body()
        except Unwound:
            self.error = None
        except BaseException as error:
            self.error = error
        finally:
            self.done = True
            self._back.put(None)
