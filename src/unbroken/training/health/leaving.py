"""Telling that the run went back to an earlier checkpoint, and leaving where that takes another process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NoReturn

from unbroken.checkpoint.store import CheckpointStore
from unbroken.rundir import layout
from unbroken.rundir.last_words import ROLL_BACK, LastWords
from unbroken.rundir.rollbacks import Rollback
from unbroken.training.attempt import Attempt
from unbroken.training.full_disk import FullDisk
from unbroken.training.leaving_out import window_in_words
from unbroken.training.preemption import StopRequested
from unbroken.training.saver import Saver

_HINT = "see `unbroken report`, and look at the data that is left out"


def leave_to_go_back(
    rollback: Rollback,
    target: str | None,
    *,
    attempt: Attempt,
    saver: Saver,
    full_disk: FullDisk,
    hint: str = _HINT,
) -> NoReturn:
    """End this process by StopRequested, so that the next one goes back to `target`; None: to the beginning.

    `rollback` is on record already.
    """
    # What was copied since belongs to the trouble.
    saver.forget_copies()
    names = CheckpointStore(attempt.run_directory).names()
    parsed = None if target is None else layout.parse_checkpoint_name(target)
    step = 0 if parsed is None else parsed[0]
    tainted = names[0 if target is None else names.index(target) + 1 :]
    say_gone_back(
        rollback,
        target,
        step,
        tainted=tainted,
        in_process=False,
        attempt=attempt,
        full_disk=full_disk,
        hint=hint,
    )
    reason = f"rolled back to {target or 'the beginning'}: {rollback.reason}"
    words = LastWords(ending="stopped", kind=ROLL_BACK, step=step, checkpoint=target, reason=reason)
    full_disk.write(lambda: attempt.say(words), "the last words")
    if os.environ.get(layout.ATTEMPT_VARIABLE) is None:
        attempt.tell("stopped to go back; start it again, `unbroken run` does so by itself")
    raise StopRequested(reason)


def say_gone_back(
    rollback: Rollback,
    target: str | None,
    step: int,
    *,
    tainted: Sequence[str],
    in_process: bool,
    attempt: Attempt,
    full_disk: FullDisk,
    hint: str = _HINT,
) -> None:
    """Put on record, and tell people, that the run goes back to `target`, of `step`."""
    fields: dict[str, Any] = {
        "step": step,
        "found_step": rollback.found_step,
        "trusted_step": rollback.trusted_step,
        "checkpoint": target,
        "tainted": list(tainted),
        "windows": [asdict(one) for one in rollback.windows],
        "reason": rollback.reason,
        "in_process": in_process,
    }
    full_disk.write(lambda: attempt.journal.append("rolled-back", **fields), "the journal")
    left_out = "; ".join(map(window_in_words, rollback.windows)) or "nothing"
    where = f"back to {target or 'the beginning'} (step {step})"
    text = f"{rollback.reason}; {where}, left out from there: {left_out}"
    full_disk.write(lambda: attempt.alarm(ROLL_BACK, text, hint), "an alarm")
