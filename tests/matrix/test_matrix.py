"""Twin runs over optimizers, schedulers, scalers, averages, accumulation and ways to stop.

Each run trains several rows of the matrix side by side. It is stopped, goes on in a fresh process, is
stopped again, and goes on for more than an epoch: all of it equal bit for bit to the run that never was.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from unbroken.rundir import layout
from unbroken.rundir.journal import read_events
from unbroken.testing.runs import compare_runs, read_logged_steps

from ..training.processes import train
from .builders import FIRST_SCALES
from .covering import Row
from .factors import BATCHES_PER_EPOCH, all_rows, covering_rows, in_runs, name_of

SCRIPT = Path(__file__).with_name("script.py")
EXIT_CODES = {"kill": -signal.SIGKILL, "exit": 7, "term": 75, "request": 75}
SAMPLES = BATCHES_PER_EPOCH * 4 - 2


def id_of(rows: list[Row]) -> str:
    return f"{rows[0]['accumulation']}-{rows[0]['stops']}-{len(rows)}".translate(
        {ord(" "): "-", ord(":"): None}
    )


def twins(directory: Path, rows: list[Row]) -> tuple[Path, Path]:
    """Train `rows` once without a stop and once with their stops; return both run directories."""
    asked = directory / "rows.json"
    asked.write_text(json.dumps(rows))
    expected, found = directory / "expected", directory / "found"
    run_script(expected, asked)
    for stop in rows[0]["stops"].split():
        run_script(found, asked, stop)
    run_script(found, asked)
    return expected, found


def run_script(run_dir: Path, asked: Path, stop: str | None = None) -> None:
    arguments = [] if stop is None else ["--stop", stop]
    done = train(run_dir, str(asked), *arguments, script=SCRIPT)
    expected = 0 if stop is None else EXIT_CODES[stop.partition(":")[0]]
    assert done.returncode == expected, done.stderr


def held(run_dir: Path) -> dict[str, str]:
    """Return what the script itself wrote about its objects at its end."""
    found: dict[str, str] = json.loads(run_dir.with_suffix(".final.json").read_text())
    return found


def begun_at(run_dir: Path) -> list[int]:
    """Return the step at which each attempt began."""
    return [
        event["step"]
        for attempt in layout.attempts(run_dir)
        for event in read_events(layout.attempt_directory(run_dir, attempt) / layout.events_file())
        if event["kind"] == "began"
    ]


def different(expected: Path, found: Path) -> list[str]:
    """Return the names of what is not held alike at the end."""
    one, other = held(expected), held(found)
    return [name for name in one | other if one.get(name) != other.get(name)]


def check_equal(expected: Path, found: Path) -> None:
    assert 0 not in begun_at(found)[1:], "an attempt began anew"
    assert compare_runs(expected, found).differences == ()
    assert different(expected, found) == []


def check_that_it_matters(run_dir: Path, rows: list[Row]) -> None:
    """Whatever a row names must have moved, or it would prove nothing that it was put back."""
    logged = [entry.metrics for entry in read_logged_steps(run_dir) if entry.kind == "step"]
    epochs = [sorted(json.loads(held(run_dir)["order"])[start : start + SAMPLES]) for start in (0, SAMPLES)]
    assert epochs == [list(range(SAMPLES))] * 2
    for row in rows:

        def values(metric: str, name: str = name_of(row)) -> list[Any]:
            return [metrics[f"{name}.{metric}"] for metrics in logged]

        assert len(set(values("loss"))) > len(logged) / 2, name_of(row)
        assert row["scheduler"] == "none" or len(set(values("lr0"))) > 1, name_of(row)
        # bfloat16 takes every step and so the scale grows; float16 overflows at first, and skips them.
        if row["scaler"] == "bfloat16":
            assert values("scale")[-1] > values("scale")[0], name_of(row)
        if row["scaler"] == "float16":
            assert values("scale")[0] < FIRST_SCALES["float16"], name_of(row)


def first_of_each(runs: list[list[Row]]) -> list[Any]:
    """Return `runs`; of those with the same stops all but the first are chaos."""
    met: set[str] = set()
    found = []
    for rows in runs:
        marks = [pytest.mark.chaos] if id_of(rows)[:-2] in met else []
        met.add(id_of(rows)[:-2])
        found.append(pytest.param(rows, id=id_of(rows), marks=marks))
    return found


@pytest.mark.parametrize("rows", first_of_each(in_runs(covering_rows(), 24)))
def test_every_two_choices_together_resume_bit_for_bit(tmp_path: Path, rows: list[Row]) -> None:
    expected, found = twins(tmp_path, rows)
    check_that_it_matters(expected, rows)
    check_equal(expected, found)


@pytest.mark.chaos
@pytest.mark.parametrize("rows", in_runs(all_rows(), 24), ids=id_of)
def test_all_choices_together_resume_bit_for_bit(tmp_path: Path, rows: list[Row]) -> None:
    check_equal(*twins(tmp_path, rows))


def test_whatever_is_not_kept_shows_in_its_row_and_in_no_other(tmp_path: Path) -> None:
    common = {
        "optimizer": "AdamW",
        "flavour": "plain",
        "scheduler": "OneCycleLR",
        "scaler": "float16",
        "average": "EMA",
        "accumulation": "4 carried over",
        "stops": "term:9 kill:17",
    }
    # An optimizer or a scheduler that is no part is refused; see tests/training/test_unkept.py.
    forgetful = [{**common, "forgotten": what} for what in ("scaler", "average", "window")]
    expected, found = twins(tmp_path, [common, *forgetful])
    shown = {name.partition(".")[0] for name in different(expected, found)}
    logged = {
        line.partition("expected ")[2].partition(".")[0]
        for line in compare_runs(expected, found).differences
        if line.startswith("step")
    }
    everything = {name_of(row) for row in forgetful}
    # The loss of a window is gone when the window is over; no loss ever depends on averaged weights.
    assert shown == everything - {name_of({**common, "forgotten": "window"})}
    assert logged == everything - {name_of({**common, "forgotten": "average"})}
