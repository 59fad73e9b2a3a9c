"""What follows after memory ran out: smaller parts, as long as they may help, and remembered."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from unbroken.rundir import layout
from unbroken.rundir.files import write_json
from unbroken.rundir.heartbeat import Heartbeat
from unbroken.supervisor.judging.verdict import Verdict
from unbroken.supervisor.memory_hints import Remembered, forget, halvings, halvings_of_next, parts_of_next
from unbroken.supervisor.restart_policy import Ended, RestartPolicy, decide

from .conftest import Bench


def ended(cause: str, step: int = -1, halvings: int = 0, samples: int = 8) -> Remembered:
    return Remembered(cause=cause, checkpoint_step=step, halvings=halvings, samples=samples)


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([], 0),
        ([ended("")], 0),
        ([ended("device-memory")], 1),
        ([ended("device-memory", step=500)], 1),
        ([ended("device-memory"), ended("device-memory", halvings=1)], 2),
        ([ended("device-memory"), ended("", halvings=1), ended("", halvings=1)], 1),
        ([ended("device-memory"), ended("", halvings=0)], 1),
        ([ended("device-memory", halvings=3)], 0),
        ([ended("device-memory", halvings=2, samples=7)], 3),
        ([ended("device-memory", samples=0)], 0),
        ([ended("memory")], 1),
        ([ended("memory", step=500)], 0),
        ([ended("memory", step=500), ended("memory", step=500)], 1),
        ([ended("memory", step=500), ended("memory", step=900)], 0),
        ([ended("shared-memory")], 0),
    ],
    ids=[
        "nothing was tried yet",
        "it ended for another reason",
        "the device's memory ran out",
        "it ran out after a checkpoint, by a larger batch",
        "halves were too large, too",
        "halves fit",
        "what was learned outlasts an attempt that was not told",
        "parts of one sample cannot be halved",
        "seven samples in four parts can",
        "its script cannot split a batch",
        "the host's memory ran out before any checkpoint",
        "the host's memory ran out after a checkpoint, which may be a leak",
        "it ran out again without a newer one",
        "it leaks, and comes further each time",
        "memory for handing over batches has nothing to do with their size",
    ],
)
def test_batches_are_halved_once_more_than_where_memory_ran_out(
    history: list[Remembered], expected: int
) -> None:
    assert halvings(history) == expected


def leave(directory: Path, number: int, *, cause: str, **mark: int) -> None:
    place = layout.attempt_directory(directory, number)
    write_json(place / layout.VERDICT_FILE, {"outcome": "failed", "cause": cause})
    beat = Heartbeat(place / layout.HEARTBEAT)
    beat.beat(phase="training", step=4, checkpoint_step=-1)
    beat.close()
    if mark:
        write_json(place / layout.MICRO_BATCHES_FILE, mark)


def test_it_is_read_off_what_the_attempts_have_left_and_forgotten_on_request(tmp_path: Path) -> None:
    assert halvings_of_next(tmp_path) == 0
    leave(tmp_path, 1, cause="device-memory", halvings=0, samples=8)
    leave(tmp_path, 2, cause="device-memory", halvings=1, samples=8)
    leave(tmp_path, 3, cause="", halvings=2, samples=8)
    assert halvings_of_next(tmp_path) == 2
    # Whether the verdict on the last is there already, as where a supervisor was killed after that.
    assert parts_of_next(tmp_path, 2, cause="device-memory") == 4
    leave(tmp_path, 4, cause="", halvings=2, samples=8)
    assert parts_of_next(tmp_path, 4, cause="device-memory") == 8
    assert parts_of_next(tmp_path, 4, cause="") is None
    (layout.attempt_directory(tmp_path, 2) / layout.VERDICT_FILE).write_text("torn")
    assert halvings_of_next(tmp_path) == 1
    forget(tmp_path)
    assert halvings_of_next(tmp_path) == 0


def test_smaller_parts_are_tried_at_once_also_where_nothing_has_worked_yet() -> None:
    verdict = Verdict(
        outcome="failed", confidence="certain", evidence=("out of memory",), kind="OutOfMemoryError"
    )

    def history(*parts: int | None) -> list[Ended]:
        return [
            Ended(
                verdict=verdict,
                started_seconds=float(index),
                lived_seconds=1.0,
                has_words=True,
                made_step=False,
                checkpoint=None,
                parts=count,
            )
            for index, count in enumerate(parts)
        ]

    def action(found: list[Ended], *, is_stop_asked: bool = False) -> tuple[str, float]:
        decision = decide(
            found,
            RestartPolicy(),
            first_checkpoint=None,
            is_stop_asked=is_stop_asked,
            now_seconds=100.0,
            random=1.0,
        )
        return decision.action, decision.delay_seconds

    assert action(history(2, 4, 8, 16, 32, 64, 128)) == ("restart", 0.0)
    assert action(history(2, 4, None)) == ("hold", 0.0)
    assert action(history(2), is_stop_asked=True)[0] == "stopped"


# Trains without a framework, on batches of numbers; what it raises is called as torch's own error.
TRAINING = """
import argparse, unbroken

class OutOfMemoryError(RuntimeError):
    pass

parser = argparse.ArgumentParser()
parser.add_argument("--fits", type=int)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--batch", type=int, default=4)
wanted = parser.parse_args()
state = {"sum": 0.0}
with unbroken.Run(save=[unbroken.EverySteps(2)], state=state) as run:
    for epoch in run.epochs(wanted.epochs):
        for batch in run.batches([list(range(n, n + wanted.batch)) for n in range(4)]):
            mean = 0.0
            for part, share in run.micro_batches(batch):
                if len(part) > wanted.fits:
                    raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
                mean += share * sum(part) / len(part)
            state["sum"] += mean
            run.step(sum=state["sum"])
"""


def marks(bench: Bench) -> list[int]:
    return [
        json.loads(path.read_text())["halvings"]
        for path in sorted(bench.directory.glob(f"attempts/*/{layout.MICRO_BATCHES_FILE}"))
    ]


def events(bench: Bench, attempt: int, kind: str) -> list[dict[str, Any]]:
    path = bench.directory / f"attempts/{attempt:04d}/events-rank0.jsonl"
    return [event for event in map(json.loads, path.read_text().splitlines()) if event["kind"] == kind]


def test_a_run_restarts_with_parts_that_fit_says_so_and_begins_whole_again_on_request(bench: Bench) -> None:
    script = bench.script("train.py", TRAINING)
    done = bench.run(sys.executable, script, "--fits", "2")
    assert done.returncode == 0, done.stderr + bench.output(1)
    assert marks(bench) == [0, 1]
    assert bench.verdict(1)["cause"] == "device-memory"
    journal = map(json.loads, (bench.directory / layout.JOURNAL_FILE).read_text().splitlines())
    assert [event["record"]["parts"] for event in journal if event["kind"] == "attempt-ended"] == [2, None]
    assert (
        "memory ran out; now each batch is computed in 2 parts"
        in (bench.directory / layout.JOURNAL_FILE).read_text()
    )
    assert [event["metrics"]["sum"] for event in events(bench, 2, "step")] == [1.5, 4.0, 7.5, 12.0]
    said = "micro-batches: each batch is computed in 2 parts, not bit-exact with one that is whole"
    assert said in bench.output(2)
    again = [sys.executable, script, "--fits", "2", "--epochs", "2"]
    done = bench.run(*again, options=("--whole-batches",))
    assert done.returncode == 0, done.stderr + bench.output(3)
    # Whole ones do not fit this time either.
    assert marks(bench) == [0, 1]
    (began,) = events(bench, 4, "began")
    assert "micro_batches" not in " ".join(began["report"])
    (began,) = events(bench, 3, "began")
    assert "the bits of what follows may differ: micro_batches changed" in began["report"]


def test_a_run_whose_single_samples_do_not_fit_is_held(bench: Bench) -> None:
    done = bench.run(sys.executable, bench.script("train.py", TRAINING), "--fits", "0", "--batch", "2")
    assert done.returncode == 78, done.stderr
    assert marks(bench) == [0, 1]
