"""What ``dtorch status`` and ``dtorch top`` do."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import NoReturn, TextIO

import msgspec

from ..observability.status import Status
from ..observability.table import told
from .addresses import ports
from .asking import Question
from .keys import Keys

EVERY_S = 1.0

ANEW = "\x1b[H\x1b[2J"
"""Tells a terminal to begin at its top left, and to clear what stands there."""


def show_status(controller: str, key: str | None, as_json: bool) -> int:
    """Print how a cluster does; returns the exit code."""
    keys, (_, health) = Keys.read(key), ports(controller)
    with closing(Question(keys, health)) as question:
        print(_text(question.ask(), as_json))
    return 0


def show_top(controller: str, key: str | None, as_json: bool) -> int:
    """The same again and again, until Ctrl-C; returns the exit code."""
    keys, (_, health) = Keys.read(key), ports(controller)
    with closing(Question(keys, health)) as question:
        try:
            redraw(question.ask, as_json, sys.stdout, partial(time.sleep, EVERY_S))
        except KeyboardInterrupt:
            return 0


def redraw(ask: Callable[[], Status], as_json: bool, out: TextIO, rest: Callable[[], None]) -> NoReturn:
    """Write a status after the other: at a terminal each in place of the one before, elsewhere one below the other."""
    while True:
        text = _text(ask(), as_json)
        out.write(f"{ANEW}{text}\n" if out.isatty() else f"{text}\n\n")
        out.flush()
        rest()


def _text(status: Status, as_json: bool) -> str:
    if not as_json:
        return told(status)
    return msgspec.json.format(msgspec.json.encode(status), indent=2).decode()
