"""What TensorFlow's own checkpoints do to people, and this library does not: files, failures, restarts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import unbroken
from unbroken.checkpoint.store import CheckpointStore
from unbroken.errors import RunBusyError, UsageError
from unbroken.rundir import layout

from .. import quiet_tensorflow  # noqa: F401
from ..zygote import run_script


def variables() -> dict[str, tf.Variable]:
    return {"kernel": tf.Variable(tf.zeros((2, 2))), "bias": tf.Variable(tf.zeros(2, tf.bfloat16))}


def fill(weights: dict[str, tf.Variable], value: float) -> None:
    for variable in weights.values():
        variable.assign(tf.fill(variable.shape, tf.cast(value, variable.dtype)))


def value_of(weights: dict[str, tf.Variable]) -> float:
    values = {float(number) for variable in weights.values() for number in variable.numpy().reshape(-1)}
    (value,) = values
    return value


def run_of(directory: Path, weights: dict[str, tf.Variable], **keywords: Any) -> unbroken.Run:
    given: dict[str, Any] = {"save": [unbroken.EverySteps(1)], "keep": [], **keywords}
    return unbroken.Run(directory, weights=weights, **given)


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """A run with three checkpoints; in each every weight is the number of the step."""
    weights, directory = variables(), tmp_path / "run"
    with run_of(directory, weights) as run:
        for step in (1, 2, 3):
            fill(weights, step)
            run.step()
    return directory


def flip(checkpoint: Path) -> None:
    (path,) = checkpoint.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_what_is_assigned_after_the_save_is_not_in_it(tmp_path: Path) -> None:
    weights = variables()
    with run_of(tmp_path, weights, save=[]) as run:
        fill(weights, 1)
        run.step()
        run.save()
        fill(weights, 9)
        run.step()
    again = variables()
    with run_of(tmp_path, again, resume="step-00000001"):
        assert value_of(again) == 1


@pytest.mark.parametrize("damage", ["flipped", "cut", "no data", "no manifest"])
def test_a_damaged_newest_one_is_set_aside_or_passed_over_aloud_for_the_one_before(
    three: Path, damage: str
) -> None:
    newest = three / "checkpoints/step-00000003"
    (data,) = newest.glob("*.safetensors")
    if damage == "flipped":
        flip(newest)
    elif damage == "cut":
        data.write_bytes(data.read_bytes()[:-3])
    else:
        (data if damage == "no data" else newest / "manifest.json").unlink()
    weights = variables()
    with run_of(three, weights, resume="must") as run:
        assert run.restored is not None
        assert (run.step_count, value_of(weights)) == (2, 2)
        assert any("step-00000003" in line for line in run.restored.lines())
    assert not newest.exists() or damage == "no manifest"


def test_where_all_are_damaged_nothing_begins_anew_by_itself(three: Path) -> None:
    for name in CheckpointStore(three).names():
        flip(three / "checkpoints" / name)
    weights = variables()
    with pytest.raises(unbroken.UnbrokenError), run_of(three, weights):
        pass
    assert value_of(weights) == 0


def test_a_restart_that_restores_nothing_is_refused_and_deletes_nothing(three: Path) -> None:
    before = CheckpointStore(three).names()
    with (
        pytest.raises(UsageError, match="expected no checkpoints"),
        run_of(three, variables(), resume="never", keep=[unbroken.KeepLast(1)]),
    ):
        pass
    assert CheckpointStore(three).names() == before


def test_what_a_killed_save_has_left_is_swept_at_the_next_start(three: Path) -> None:
    left = three / "checkpoints" / f"{layout.STAGING_PREFIX}step-00000004-left"
    shutil.copytree(three / "checkpoints/step-00000003", left)
    with run_of(three, variables()):
        assert not left.exists()


def test_a_second_writer_of_one_place_is_refused(three: Path) -> None:
    with run_of(three, variables()), pytest.raises(RunBusyError), run_of(three, variables()):
        pass


SCRIPT = """
import sys
from pathlib import Path
import tensorflow as tf
import unbroken

weights = {"kernel": tf.Variable(tf.zeros((2, 2)))}
with unbroken.Run(sys.argv[1], save=[], weights=weights) as run:
    run.step()
    place = Path(sys.argv[1], "checkpoints")
    if place.exists():
        place.rmdir()
    place.touch()
    run.save()
"""


def test_a_last_save_that_fails_in_the_background_reaches_the_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = run_script(script, str(tmp_path / "run"), output=tmp_path / "output", framework="tensorflow")
    assert done.returncode == 1, done.stderr
    assert "a checkpoint could not be written" in done.stderr
