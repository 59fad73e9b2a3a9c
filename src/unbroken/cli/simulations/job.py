"""The toy job: a training script in every respect that matters here, but for the training."""

from __future__ import annotations

import random
from pathlib import Path

SAVE_EVERY = 10
# The step in which it is hurt: half-way between two checkpoints.
HURT_IN_STEP = 26
_DECAY = 0.9

_TEXT = '''\
"""A toy: its state is one number, which every step changes at random."""

import os
import random
import signal
import threading
import time

import unbroken


def hurt():
    {hurt}


random.seed(7)
state = {{"value": 0.0}}
with unbroken.Run(save=[unbroken.EverySteps({save_every})], state=state) as run:
    for epoch in run.epochs(1):
        for batch in run.batches(range({steps})):
            state["value"] = {decay} * state["value"] + random.random()
            time.sleep({step_seconds})
            if run.step_count + 1 == {hurt_in} and os.environ["UNBROKEN_ATTEMPT"] == "1":
                hurt()
            run.step(value=state["value"])
'''


def write_job(path: Path, *, hurt: str = "pass", steps: int = 40, step_seconds: float = 0.02) -> None:
    """Write a job of `steps` steps to `path`; `hurt` is the body of what strikes its first attempt."""
    text = _TEXT.format(
        hurt=hurt.replace("\n", "\n    "),
        save_every=SAVE_EVERY,
        decay=_DECAY,
        hurt_in=HURT_IN_STEP,
        steps=steps,
        step_seconds=step_seconds,
    )
    path.write_text(text, encoding="utf-8")


def undisturbed_value(steps: int) -> float:
    """Return what the state of a job is after `steps` steps if nothing happens to it."""
    generator = random.Random(7)
    value = 0.0
    for _ in range(steps):
        value = _DECAY * value + generator.random()
    return value
