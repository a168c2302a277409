"""Log records between processes: bounded, told when dropped, and never waited for."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dtorch.core.control import Origin, Record
from dtorch.observability import logs
from dtorch.observability.logs import MOST_CHARACTERS, REMOTE, Budget, Inlet, Outlet

ORIGIN = Origin(title="worker", name="h.2.0", host="h", pid=4711, worker=2, devices="devices 2, 5, ...")
WAIT_S = 20.0


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@contextmanager
def outlet(level: int = logging.INFO, budget: Budget | None = None) -> Iterator[list[Record]]:
    """What a process that is asked for its records sends."""
    sent: list[Record] = []

    def send(record: Record) -> bool:
        sent.append(record)
        return True

    handler = Outlet(ORIGIN, level, send, budget)
    try:
        yield sent
    finally:
        handler.close()


def record(text: str = "", level: int = logging.INFO, **more: object) -> Record:
    return Record(origin=ORIGIN, level=level, name="theirs", text=text, created_s=5.0, **more)  # type: ignore[arg-type]


class Heard(logging.Handler):
    """A handler of the client's that keeps records, and may be held up."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()

    def emit(self, record: logging.LogRecord) -> None:
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        self.records.append(record)


@pytest.fixture
def heard() -> Iterator[Heard]:
    handler, logger = Heard(), logging.getLogger(REMOTE)
    logger.addHandler(handler)
    yield handler
    handler.gate.set()
    logger.removeHandler(handler)


def test_what_a_process_logs_is_sent_from_the_level_on() -> None:
    root, before = logging.getLogger(), logging.getLogger().level
    with outlet() as sent:
        logging.getLogger("mine").info("%d of %s", 3, "four")
        logging.getLogger("mine").debug("less")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("careful", stacklevel=1)
        try:
            raise KeyError("gone")
        except KeyError:
            logging.getLogger("mine").exception("failed")
    logging.getLogger("mine").error("after the end")
    assert [(r.name, r.level) for r in sent] == [("mine", 20), ("py.warnings", 30), ("mine", 40)]
    assert sent[0].text == "3 of four" and sent[0].file == __file__ and sent[0].function.startswith("test_")
    assert "careful" in sent[1].text and "KeyError: 'gone'" in sent[2].trace and sent[0].trace == ""
    assert root.level == before


def test_what_has_arrived_is_not_sent_again() -> None:
    with outlet() as sent:
        logging.getLogger(f"{REMOTE}.2").error("arrived")
    assert sent == []


def test_a_long_text_is_cut() -> None:
    with outlet() as sent:
        logging.getLogger("mine").info("x" * 100_000)
    assert len(sent[0].text) < MOST_CHARACTERS + 50 and sent[0].text.endswith("(100000 characters)")


def test_a_flood_is_dropped_counted_and_told() -> None:
    clock = Clock()
    with outlet(budget=Budget(5, 2, clock)) as sent:
        for n in range(20):
            logging.getLogger("mine").info("%d", n)
        assert [r.text for r in sent[:5]] == list("01234") and "records are dropped" in sent[5].text and len(sent) == 6
        assert sent[5].level == logging.WARNING
        clock.now_s = 0.6
        logging.getLogger("mine").info("too early for the next two")
        clock.now_s = 1.0
        logging.getLogger("mine").info("again")
        logging.getLogger("mine").info("and again")
    assert [(r.text, r.dropped) for r in sent[6:]] == [("again", 16), ("and again", 0)]


def test_a_record_that_cannot_be_written_out_hurts_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    with outlet() as sent:
        (handler,) = [h for h in logging.getLogger().handlers if isinstance(h, Outlet)]
        # Only to it: pytest's own handlers raise.
        handler.handle(logging.makeLogRecord({"name": "mine", "levelno": 40, "msg": "%d", "args": ("no number",)}))
        logging.getLogger("mine").info("the next")
    assert "Logging error" in capsys.readouterr().err and [r.text for r in sent] == ["the next"]


def test_records_arrive_with_where_they_come_from(heard: Heard) -> None:
    inlet = Inlet(logging.INFO)
    inlet.take(record("well", trace="Traceback: here", file="/a/b.py", line=7, function="f", thread="T"))
    inlet.take(record("less", logging.DEBUG))
    inlet.close()
    inlet.take(record("late"))
    (one,) = heard.records
    assert (one.name, one.levelname, one.getMessage()) == (f"{REMOTE}.2", "INFO", "[worker 2 on h, devices 2, 5, ...] well")
    assert (one.filename, one.lineno, one.funcName, one.created, one.process, one.threadName) == ("b.py", 7, "f", 5.0, 4711, "T")
    assert (vars(one)["worker"], vars(one)["host"], vars(one)["source"]) == (2, "h", "theirs")
    assert logging.Formatter().format(one).endswith("well\nTraceback: here")
    assert logging.getLogger(REMOTE).level == logging.NOTSET


def test_a_level_of_ones_own_stays(heard: Heard) -> None:
    logger = logging.getLogger(REMOTE)
    logger.setLevel(logging.ERROR)
    try:
        inlet = Inlet(logging.INFO)
        inlet.take(record("less"))
        inlet.take(record("well", logging.ERROR))
        inlet.close()
        assert [r.levelname for r in heard.records] == ["ERROR"] and logger.level == logging.ERROR
    finally:
        logger.setLevel(logging.NOTSET)


def test_a_handler_that_is_held_up_holds_up_nobody(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MOST_WAITING", 3)
    heard.gate.clear()
    inlet = Inlet(logging.INFO)
    inlet.take(record("first"))
    assert heard.entered.wait(WAIT_S)
    for n in range(10):
        inlet.take(record(str(n), dropped=1))
    heard.gate.set()
    inlet.close()
    texts = [r.getMessage().partition("] ")[2] for r in heard.records]
    assert texts[:3] == ["first", "records dropped before this one: 8", "0"] and texts[-1] == "2"


def test_the_end_waits_for_no_handler(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "END_S", 0.05)
    heard.gate.clear()
    inlet = Inlet(logging.INFO)
    inlet.take(record("first"))
    inlet.take(record("second"))
    assert heard.entered.wait(WAIT_S)
    inlet.close()
    heard.gate.set()
    inlet._thread.join(WAIT_S)
    assert len(heard.records) == 1


def test_a_filter_that_fails_ends_nothing(heard: Heard, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(record: logging.LogRecord) -> bool:
        heard.removeFilter(fail)
        raise RuntimeError("a filter")

    heard.addFilter(fail)
    inlet = Inlet(logging.INFO)
    inlet.take(record("one"))
    inlet.take(record("two"))
    inlet.close()
    assert len(heard.records) == 1 and "a filter" in capsys.readouterr().err
