"""Log records on their way from a session's processes to the client's ``logging``. Bounded everywhere: nobody waits for a log."""

from __future__ import annotations

import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable

from ..core.control import Origin, Record

REMOTE = "dtorch.remote"
"""The logger under which records of other processes arrive."""

MOST_AT_ONCE, MOST_A_SECOND = 500, 100
"""How many records a process sends: more are dropped and counted."""

MOST_CHARACTERS = 8192
"""Of a record's text, and of its traceback."""

MOST_WAITING = 10_000
"""How many records the client holds that it has not handled."""

END_S = 2.0
"""How long the end waits for the client's handlers."""


class Budget:
    """So many at once, and then so many a second, about once a second."""

    def __init__(self, at_once: int, a_second: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._a_second, self._clock = at_once, a_second, clock
        self._left, self._then_s = float(at_once), clock()
        self._needed = 1

    def take(self) -> bool:
        """Whether there is one more."""
        now_s = self._clock()
        self._left = min(self._most, self._left + (now_s - self._then_s) * self._a_second)
        self._then_s = now_s
        if self._left < self._needed:
            # Not one now and one then, each beside words about those between.
            self._needed = self._a_second
            return False
        self._left, self._needed = self._left - 1, 1
        return True


class Outlet(logging.Handler):
    """Sends what this process logs, and its warnings, while it is open.

    Args:
        origin: of the records.
        level: of those that are sent, as in ``logging``.
        send: called with each, from whatever thread logs; it must not wait, and says whether it has taken the record.
    """

    def __init__(self, origin: Origin, level: int, send: Callable[[Record], bool], budget: Budget | None = None) -> None:
        super().__init__(level)
        self._origin, self._send = origin, send
        self._budget = budget or Budget(MOST_AT_ONCE, MOST_A_SECOND)
        self._dropped = 0
        self._open = True
        root = logging.getLogger()
        self._level_before = root.level
        root.setLevel(min(root.level, level))
        root.addHandler(self)
        logging.captureWarnings(True)

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record, or count it as dropped."""
        # Where client and controller are one process, what has arrived would be sent again.
        if record.name.startswith(REMOTE):
            return
        try:
            if self._budget.take() and self._send(self._made(record)):
                self._dropped = 0
                return
            self._dropped += 1
            if self._dropped == 1:
                self._send(self._told("more is logged than can be sent: records are dropped"))
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        """Send nothing more; a second call does nothing."""
        if self._open:
            self._open = False
            root = logging.getLogger()
            root.removeHandler(self)
            root.setLevel(self._level_before)
            logging.captureWarnings(False)
        super().close()

    def _made(self, record: logging.LogRecord) -> Record:
        trace = logging.Formatter().formatException(record.exc_info) if record.exc_info else record.exc_text or ""
        return Record(
            origin=self._origin,
            level=record.levelno,
            name=record.name,
            text=_cut(record.getMessage()),
            trace=_cut(trace),
            file=record.pathname,
            line=record.lineno,
            function=record.funcName or "",
            thread=record.threadName or "",
            created_s=record.created,
            dropped=self._dropped,
        )

    def _told(self, text: str) -> Record:
        return Record(
            origin=self._origin, level=max(self.level, logging.WARNING), name=__name__, text=text, created_s=time.time()
        )


class Inlet:
    """Gives records of other processes to this one's ``logging``. Its owner calls ``close``.

    It does so from a thread of its own: a handler may take its time, or format a tensor and so wait for the very session.

    Args:
        level: of ``dtorch.remote``, if it has none of its own.
    """

    def __init__(self, level: int) -> None:
        self._waiting: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self._missed, self._ended = 0, False
        self._logger = logging.getLogger(REMOTE)
        self._levelled = self._logger.level == logging.NOTSET
        if self._levelled:
            self._logger.setLevel(level)
        self._thread = threading.Thread(target=self._work, name="dtorch-logs", daemon=True)
        self._thread.start()

    def take(self, record: Record) -> None:
        """A record has come; never waits."""
        if self._waiting.qsize() < MOST_WAITING:
            self._waiting.put(record)
        else:
            self._missed += 1

    def close(self) -> None:
        """Handle what has come, and nothing later."""
        self._waiting.put(None)
        # A handler may end the session itself.
        if threading.current_thread() is not self._thread:
            self._thread.join(END_S)
        self._ended = True
        if self._levelled:
            self._logger.setLevel(logging.NOTSET)

    def _work(self) -> None:
        while (record := self._waiting.get()) is not None and not self._ended:
            dropped, self._missed = record.dropped + self._missed, 0
            if dropped:
                _handle(record, max(logging.WARNING, record.level), f"records dropped before this one: {dropped}")
            _handle(record, record.level, record.text, record.trace)


def _handle(record: Record, level: int, text: str, trace: str = "") -> None:
    origin = record.origin
    logger = logging.getLogger(f"{REMOTE}.{origin.title if origin.worker is None else origin.worker}")
    if not logger.isEnabledFor(level):
        return
    where = f"worker {origin.worker}" if origin.worker is not None else origin.title
    about = ", ".join(filter(None, [f"{where} on {origin.host}", origin.devices]))
    told = f"[{about}] {text}"
    made = logging.LogRecord(logger.name, level, record.file, record.line, told, None, None, record.function)
    made.created, made.msecs = record.created_s, record.created_s % 1 * 1000
    made.process, made.processName, made.threadName, made.exc_text = origin.pid, origin.name, record.thread, trace
    extra = {"worker": origin.worker, "host": origin.host, "devices": origin.devices, "source": record.name}
    made.__dict__.update(extra)
    try:
        logger.handle(made)
    except Exception:
        # A filter's: handlers tell their own. As logging does, say so and go on.
        traceback.print_exc()


def _cut(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} ... ({len(text)} characters)"
