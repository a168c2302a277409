"""Letters from worker to worker."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from dtorch.cluster.keys import Keys
from dtorch.transport.post import MOST_NBYTES, Post

KEYS = Keys.generate()


@pytest.fixture
def boxes() -> Iterator[list[Post]]:
    made = [Post(number, "127.0.0.1", KEYS.lock) for number in range(3)]
    for box in made:
        box.introduce([each.address for each in made])
    yield made
    for box in made:
        box.close()


def received(box: Post, peer: int, subject: str) -> bytes:
    deadline = time.monotonic() + 30
    while (data := box.receive(peer, subject)) is None:
        assert time.monotonic() < deadline
    return data


def test_letters_by_sender_and_subject(boxes: list[Post]) -> None:
    one, two, three = boxes
    for subject in ("a", "b"):
        two.send(0, subject, subject.encode() * 2)
        three.send(0, subject, subject.encode() * 3)
    assert [received(one, 2, "b"), received(one, 1, "b"), received(one, 1, "a"), received(one, 2, "a")] == [
        b"bbb",
        b"bb",
        b"aa",
        b"aaa",
    ]
    assert one.receive(1, "a") is None


def test_a_letter_that_is_too_long_is_not_taken(boxes: list[Post]) -> None:
    one, two, three = boxes
    # With what encryption adds.
    two.send(0, "short", b"x" * (MOST_NBYTES - 100))
    assert len(received(one, 1, "short")) == MOST_NBYTES - 100
    two.send(0, "long", b"x" * (MOST_NBYTES + 1))
    three.send(0, "later", b"y")
    assert received(one, 2, "later") == b"y"
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        assert one.receive(1, "long") is None
