"""Pipelines of tf.data, stopped and gone on with in fresh processes: each batch as if nothing had been."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from .. import quiet_tensorflow  # noqa: F401
from ..zygote import run_script
from .pipelines import PIPELINES, iterated

SCRIPT = Path(__file__).with_name("pipelines_script.py")
# Each way of going on once; the long test has all of them.
QUICK = ("cached between shuffles", "sampled", "zipped by names", "a generator, repeated")
# Epochs of all batches, and epochs that the loop leaves after three.
WHOLE, LEFT = None, 3
# Left before they are at their end, these differ in plain loops, too: TensorFlow gives up a cache in memory
# when it comes to it, and reads ahead into the next repetition, which draws its order, or does not.
NEVER_THE_SAME = {("cached between shuffles", LEFT), ("shuffled and repeated", LEFT)}


def attempt(directory: Path, cases: Sequence[tuple[str, int | None]], stop_at: int) -> list[list[Any]]:
    """Return what each pipeline gives in one process, until the step of that number."""
    asked, ledgers = directory / "cases.json", directory / "ledgers.json"
    asked.write_text(json.dumps([(name, most, stop_at) for name, most in cases]))
    arguments = (str(directory), str(asked), str(ledgers))
    done = run_script(SCRIPT, *arguments, output=directory / "output", framework="tensorflow")
    assert done.returncode == 0, done.stderr
    found: list[list[Any]] = json.loads(ledgers.read_text())
    return found


def check(directory: Path, cases: Sequence[tuple[str, int | None]], stops: Sequence[int]) -> None:
    attempts = [attempt(directory, cases, stop_at) for stop_at in (*stops, -1)]
    for (name, most), *parts in zip(cases, *attempts, strict=True):
        whole = [[epoch, batch] for epoch, batch in iterated(PIPELINES[name](), most=most)]
        assert [line for part in parts for line in part] == whole, (name, most)


def test_in_fresh_processes_a_pipeline_goes_on_batch_for_batch_in_every_epoch(tmp_path: Path) -> None:
    check(tmp_path, [(name, (WHOLE, LEFT)[at % 2]) for at, name in enumerate(QUICK)], (2,))


@pytest.mark.chaos
@pytest.mark.parametrize("most", [WHOLE, LEFT])
@pytest.mark.parametrize("stop_at", range(1, 12))
def test_so_it_does_wherever_it_is_stopped(tmp_path: Path, stop_at: int, most: int | None) -> None:
    cases = [(name, most) for name in PIPELINES if (name, most) not in NEVER_THE_SAME]
    check(tmp_path, cases, (stop_at, stop_at + 1, stop_at + 6))
