"""What peers in processes promise: through memory of one host, and through process groups."""

from __future__ import annotations

import time

import pytest

from dtorch.communication.shared import LANE_NBYTES, OPENING_NBYTES, SLOT_NBYTES

from .peers_at_work import crew

SIZES = [
    [],
    [0, 1, 0],
    [OPENING_NBYTES],
    [OPENING_NBYTES + 1, 3],
    [5, SLOT_NBYTES, 7, 3 * SLOT_NBYTES + 1],
    [2 * LANE_NBYTES + 11, 9],
]

pytestmark = pytest.mark.parametrize("alone", [False, True], ids=["shared", "group"])


def test_what_is_sent_arrives_and_a_refusal_leaves_the_rest_as_it_is(alone: bool) -> None:
    with crew(3, alone=alone) as workers:
        for sizes in [*SIZES, *SIZES[::-1]]:
            nonzero = [n for n in sizes if n]
            workers.tell("exchange", nonzero, 0, 1, 2)
            assert workers.answers(0, 1, 2) == [(True, set())] * 3, sizes
            workers.tell("exchange", nonzero, 0, 2)
            workers.tell("refuse", None, 1)
            assert workers.answers(0, 1, 2) == [(True, {1}), (True, set()), (True, {1})], sizes


def test_abort_ends_a_wait(alone: bool) -> None:
    with crew(3, alone=alone) as workers:
        workers.tell("exchange", [5], 0, 1, 2)
        workers.answers(0, 1, 2)
        workers.tell("abort", 0.3, 0)
        workers.answers(0)
        workers.tell("exchange", [1 << 22], 0, 1)
        began = time.monotonic()
        ((lost, _),) = workers.answers(0)
        assert lost in (1, 2) and time.monotonic() - began < 3
        workers.tell("exchange", [5], 0)
        assert workers.answers(0)[0][1] is None
        workers.processes[2].kill()
        if not alone:
            # Who shares memory notices by itself.
            assert workers.answers(1)[0][1] is None
        else:
            workers.processes[1].kill()


def test_abort_ends_a_first_meeting(alone: bool) -> None:
    with crew(2, alone=alone) as workers:
        for me in (1, 0):
            workers.tell("abort", 0.3, me)
            workers.answers(me)
            workers.tell("exchange", [7], me)
            # The other has not come yet, or is gone already.
            assert workers.answers(me) == [(1 - me, None)]
