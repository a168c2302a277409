"""Handlers that raise wait while something must not be left half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from dtorch.core.interrupts import Allowed, Held, Insisted


@pytest.fixture
def raising() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1)}
    for number in kept:
        signal.signal(number, signal.default_int_handler)
    yield
    # Whatever happened, the handlers are back.
    assert all(signal.getsignal(number) is signal.default_int_handler for number in kept)
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
@pytest.mark.usefixtures("raising")
def test_a_handler_waits_for_the_end(number: int) -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), Held():
        signal.raise_signal(number)
        done.append(1)
        with Held():
            signal.raise_signal(number)
            done.append(2)
        done.append(3)
    assert done == [1, 2, 3]


@pytest.mark.usefixtures("raising")
def test_what_is_allowed_is_interrupted_and_then_held_again() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), Held():
        try:
            with Allowed():
                signal.raise_signal(signal.SIGINT)
                done.append("not reached")
        finally:
            signal.raise_signal(signal.SIGINT)
            done.append("after")
    assert done == ["after"]


@pytest.mark.usefixtures("raising")
def test_one_that_came_before_interrupts_what_is_allowed_at_once() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), Held():
        signal.raise_signal(signal.SIGINT)
        done.append("held")
        with Allowed():
            done.append("not reached")
    assert done == ["held"]


def test_a_handler_that_returns_changes_nothing() -> None:
    told: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: told.append(number))
    try:
        with Held():
            signal.raise_signal(signal.SIGUSR1)
            assert told == []
            with Allowed():
                assert len(told) == 1
                signal.raise_signal(signal.SIGUSR1)
                assert len(told) == 2
            signal.raise_signal(signal.SIGUSR1)
            assert len(told) == 2
        assert len(told) == 3
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("raising")
def test_who_insists_is_heard() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), Held(), Insisted():
        signal.raise_signal(signal.SIGINT)
        done.append("once")
        signal.raise_signal(signal.SIGUSR1)
        done.append("of another kind")
        signal.raise_signal(signal.SIGINT)
        done.append("not reached")
    assert done == ["once", "of another kind"]


def test_an_alarm_is_heard_at_once() -> None:
    told: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: told.append(number))
    try:
        with Held(), Insisted():
            signal.raise_signal(signal.SIGALRM)
            assert told == [signal.SIGALRM]
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(told) == 1


@pytest.mark.usefixtures("raising")
def test_another_thread_holds_nothing() -> None:
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with Held(), Allowed():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(10)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    leave.set()
    thread.join()
