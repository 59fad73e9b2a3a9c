"""The ledger of every sampler with every kind of workers, over SIGKILLs at chosen and at random moments."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from ..training.test_ledger import (
    BATCHES,
    EPOCHS,
    KINDS,
    Attempt,
    Case,
    Kill,
    attempt_of,
    check,
    check_each_index_once_an_epoch,
    killed_as_planned,
    lines_of,
    start,
    train,
)

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the attempts are forked"),
]
CASES = [
    Case(kind=kind, workers=workers, persistent=persistent)
    for kind in KINDS
    for workers, persistent in ((0, False), (2, False), (2, True))
]
# Twice in one epoch, at both sides of its end, in the next ones, and at the very last step.
PLAN: tuple[Kill, ...] = (
    (2, "in hand"),
    (5, "trained"),
    (6, "trained"),
    (7, "in hand"),
    (10, "counted"),
    (12, "counted"),
    (15, "in hand"),
    (18, "trained"),
)
STARTED_SECONDS = 60.0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_index_is_trained_once_in_order_over_kills_in_every_epoch(tmp_path: Path, case: Case) -> None:
    attempts = list(killed_as_planned(case, tmp_path, PLAN))

    check(case, attempts)
    check_each_index_once_an_epoch(case)
    assert [attempt.began_at for attempt in attempts] == [0, *(step - 1 for step, _ in PLAN)]


def killed_at_random(case: Case, directory: Path, dice: random.Random) -> list[Attempt]:
    """Kill attempts from outside once they have trained a few steps, wherever they are then."""
    attempts: list[Attempt] = []
    for number in range(1, 1000):
        process = start(train, case, directory, number, None)
        ledger = directory / f"ledger{number}"
        # The first line is no step.
        wanted = 1 + dice.randrange(1, 5)
        deadline = time.monotonic() + STARTED_SECONDS
        while process.is_alive() and len(lines_of(ledger)) < wanted:
            assert time.monotonic() < deadline, f"attempt {number} did not begin"
            time.sleep(0.001)
        # Not a wait for something to happen: the moment of the kill is what is random here.
        time.sleep(dice.random() * 0.03)
        assert process.pid is not None
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL), f"attempt {number}"
        attempt = attempt_of(directory, number)
        assert attempt is not None
        attempts.append(attempt)
        if process.exitcode == 0:
            return attempts
    pytest.fail("it never came to an end")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_index_is_trained_once_in_order_over_kills_at_any_moment(tmp_path: Path, case: Case) -> None:
    dice = random.Random(str(case))

    attempts = killed_at_random(case, tmp_path, dice)

    check(case, attempts)
    assert len(attempts) > 2
    # What was done again is no more than the save in flight and the step that it was killed in.
    repeated = sum(len(attempt.lines) for attempt in attempts) - EPOCHS * BATCHES
    assert repeated <= 3 * (len(attempts) - 1)
