"""Coroutines: one of them runs at a time, and whatever happens its thread ends."""

from __future__ import annotations

import threading

import pytest

from dtorch.parallel.pipeline.coroutine import Coroutine, Unwound


def test_it_stops_and_goes_on() -> None:
    seen: list[str] = []

    def body() -> None:
        seen.append("first")
        one.pause()
        seen.append("second")

    one = Coroutine(body)
    one.resume()
    assert seen == ["first"] and not one.done
    seen.append("between")
    one.resume()
    assert seen == ["first", "between", "second"] and one.done


def test_its_error_is_raised_where_it_is_resumed() -> None:
    def body() -> None:
        one.pause()
        raise KeyError("what")

    one = Coroutine(body)
    one.resume()
    with pytest.raises(KeyError, match="what"):
        one.resume()
    assert one.done


def test_closing_unwinds_its_stack() -> None:
    seen: list[str] = []

    def body() -> None:
        try:
            one.pause()
        except Exception:
            seen.append("caught")
        finally:
            seen.append("cleaned")

    one = Coroutine(body)
    one.resume()
    one.close()
    assert seen == ["cleaned"] and one.done


def test_closing_one_that_never_ran_or_is_done_is_nothing() -> None:
    one = Coroutine(lambda: None)
    one.close()
    one.resume()
    one.close()
    other = Coroutine(lambda: None)
    other.resume()
    other.close()
    assert other.done


def test_who_clings_to_life_is_ended_at_the_next_pause() -> None:
    seen: list[int] = []

    def body() -> None:
        for i in range(3):
            try:
                one.pause()
            except BaseException as error:
                seen.append(i)
                assert isinstance(error, Unwound)

    one = Coroutine(body)
    one.resume()
    one.close()
    assert seen == [0, 1, 2] and one.done


def test_an_interrupt_while_it_runs_ends_it_at_its_next_pause() -> None:
    """As Ctrl-C does, which comes in the thread that waits."""
    running, go, seen = threading.Event(), threading.Event(), []

    def body() -> None:
        running.set()
        go.wait(10)
        try:
            one.pause()
        finally:
            seen.append("unwound")

    one = Coroutine(body)
    waiting = threading.Thread(target=one.resume)
    waiting.start()
    assert running.wait(10)
    threading.Timer(0.05, go.set).start()
    one.close()
    waiting.join(10)
    assert seen == ["unwound"] and one.done
