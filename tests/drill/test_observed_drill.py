"""`unbroken drill --observe`: scripts with a resume of their own, which know nothing of unbroken."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .forking import COMMAND, SCRIPTS, TUTORIAL, drill, forked, snippets

SCRIPT = SCRIPTS / "own_resume.py"
RESUME = ("--resume-args", "--resume last.pt")
# A checkpoint after each epoch of six steps, a death two steps later.
ONCE = ("--steps", "11", "--at", "8")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with the script, as a user has it."""
    place = tmp_path / "lab"
    place.mkdir()
    shutil.copy(SCRIPT, place)
    (place / "notes.txt").write_text("mine")
    return place


def observe(socket: Path, place: Path, leak: str, *options: str, script: str = "") -> dict[str, Any]:
    command = forked(socket, Path(SCRIPT.name), leak, *script.split())
    found = drill(command, place, "--observe", *options)
    # Nothing of what the script writes is written here.
    assert sorted(path.name for path in place.iterdir() if path.is_file()) == ["notes.txt", SCRIPT.name]
    assert found["observed"] is True
    return found


def test_a_script_with_a_right_resume_of_its_own_is_proven(socket: Path, place: Path) -> None:
    found = observe(socket, place, "none", *RESUME, *ONCE)
    assert found["verdict"] == "proven", found["headline"]
    assert [process["began_at"] for process in found["processes"]] == [0, 6]
    assert found["restored"] == 1
    assert found["components"] > 40
    assert any("not seen" in line for line in found["details"])


def test_a_script_that_ignores_how_it_is_to_resume_is_told_so(socket: Path, place: Path) -> None:
    found = observe(socket, place, "ignores", *RESUME, *ONCE)
    assert found["verdict"] == "not-exact"
    assert found["headline"] == "NOT EXACT: resume 1 began anew, though the script had saved after step 6"
    assert "--resume last.pt" in found["details"][0]


LEAKS = [
    ("moments", ["optimizer"], "18 of the values of `optimizer` were gone"),
    ("scheduler", ["scheduler"], "`scheduler` had 3 other values"),
    ("rng", ["rng/torch"], "batch content differs"),
    ("counter", ["found/main.keep<seen>"], "the number `found/main.keep<seen>` was not restored"),
    ("buffers", ["model"], "`model/1.running_mean`"),
    ("rounded", ["model"], "other values than when it was saved"),
]


@pytest.mark.chaos
@pytest.mark.parametrize(("leak", "causes", "words"), LEAKS, ids=[leak for leak, _, _ in LEAKS])
def test_what_a_script_does_not_restore_is_named_and_proved_by_putting_it_back(
    socket: Path, place: Path, leak: str, causes: list[str], words: str
) -> None:
    found = observe(socket, place, leak, *RESUME, *ONCE)
    assert found["verdict"] == "not-exact"
    assert found["causes"] == causes, found["headline"]
    assert found["repeatable"] is True
    assert found["divergence"]["began_at"] == 6
    assert words in found["headline"]


@pytest.mark.chaos
def test_a_script_that_skips_the_batches_it_has_trained_on_is_proven(socket: Path, place: Path) -> None:
    kills = ("--steps", "20", "--at", "8", "--at", "11:in-step", "--at", "15:SIGTERM")
    found = observe(socket, place, "none", *RESUME, *kills, script="--every 2")
    assert found["verdict"] == "proven", found["headline"]
    assert [process["began_at"] for process in found["processes"]] == [0, 8, 10, 14]


@pytest.mark.chaos
def test_workers_accumulation_and_evaluations_are_followed(socket: Path, place: Path) -> None:
    # Three steps of two batches each in an epoch.
    kills = ("--at", "2:in-evaluation", "--at", "5:end-of-epoch", "--at", "8:in-step", "--at", "10:in-save")
    options = "--workers 2 --accumulate 2"
    found = observe(socket, place, "none", *RESUME, "--steps", "14", *kills, script=options)
    assert found["verdict"] == "proven", found["headline"]
    assert [process["began_at"] for process in found["processes"]] == [0, 0, 3, 6, 9]
    assert found["missed"] == []


@pytest.mark.chaos
def test_a_compiled_model_is_followed(socket: Path, place: Path) -> None:
    found = observe(socket, place, "none", *RESUME, *ONCE, script="--compile")
    assert found["verdict"] == "proven", found["headline"]
    assert found["restored"] == 1


@pytest.mark.chaos
def test_two_optimizers_in_turns_without_a_loader_are_followed(socket: Path, tmp_path: Path) -> None:
    shutil.copy(SCRIPTS / "two_optimizers.py", tmp_path)
    command = forked(socket, Path("two_optimizers.py"))
    kills = ("--at", "9", "--at", "15:in-save")
    found = drill(command, tmp_path, "--observe", *RESUME, "--steps", "24", *kills)
    assert found["verdict"] == "proven", found["headline"]
    # Each turn is two steps, and a checkpoint is due after three turns.
    assert [process["began_at"] for process in found["processes"]] == [0, 6, 12]


@pytest.mark.chaos
def test_batches_that_are_read_again_are_told_as_the_data(socket: Path, place: Path) -> None:
    found = observe(socket, place, "again", *RESUME, "--steps", "11", "--at", "9", script="--every 2")
    assert found["verdict"] == "not-exact"
    assert "the data: it is the batch of step 7, read again" in found["headline"]


@pytest.mark.chaos
def test_a_script_that_finds_its_checkpoint_needs_no_arguments(socket: Path, place: Path) -> None:
    found = observe(socket, place, "finds", *ONCE)
    assert found["verdict"] == "proven", found["headline"]
    assert found["restored"] == 1


@pytest.mark.chaos
def test_a_script_that_needs_arguments_is_said_to_need_them(socket: Path, place: Path) -> None:
    found = observe(socket, place, "none", *ONCE)
    assert "resume 1 began anew" in found["headline"]
    assert "--resume-args" in found["details"][0]


@pytest.mark.chaos
def test_a_checkpoint_that_is_torn_by_a_death_is_named(socket: Path, place: Path) -> None:
    found = observe(socket, place, "torn", *RESUME, "--steps", "20", "--at", "8", "--at", "13:in-save")
    assert found["verdict"] == "failed"
    assert "resume 2, after SIGKILL in-save 13" in found["failure"]
    assert "os.replace" in found["details"][0]


@pytest.mark.chaos
def test_a_save_outside_the_copy_is_refused(socket: Path, place: Path) -> None:
    outside = place.parent / "mine"
    outside.mkdir()
    found = observe(socket, place, "none", *ONCE, script=f"--link {outside}")
    assert found["verdict"] == "failed"
    assert "expected a script that writes to paths relative to where it is started" in found["output"]
    assert list(outside.iterdir()) == []


@pytest.mark.chaos
def test_the_tutorial_tells_what_becomes_of_its_script_with_an_own_resume(
    socket: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(snippets(TUTORIAL)[2])
    command = forked(socket, Path("train.py"))
    found = drill(command, tmp_path, "--observe", *RESUME, "--steps", "20", "--kills", "3")
    assert found["causes"] == ["rng/torch"], found["headline"]
    assert found["headline"].partition("; ")[2] in TUTORIAL.read_text()
    assert found["headline"].partition(":")[0] in TUTORIAL.read_text()


@pytest.mark.chaos
def test_a_script_is_observed_as_python_starts_it(place: Path) -> None:
    command = [sys.executable, SCRIPT.name, "none", "--every", "3"]
    found = drill(command, place, "--observe", *RESUME, "--steps", "10", "--at", "5:SIGINT")
    assert found["verdict"] == "proven", found["headline"]
    assert [process["began_at"] for process in found["processes"]] == [0, 3]


@pytest.mark.chaos
def test_by_default_seven_kills_prove_a_script(socket: Path, place: Path) -> None:
    found = observe(socket, place, "none", *RESUME, script="--every 3")
    assert found["verdict"] == "proven", found["headline"]
    assert sum(process["killed"] for process in found["processes"]) == 7


def test_a_script_without_an_optimizer_is_a_usage_error(tmp_path: Path) -> None:
    command = [*COMMAND, "--observe", "--", sys.executable, "-c", "print('nothing to train')"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "no torch optimizer made one" in done.stderr


def test_resume_arguments_belong_to_scripts_that_are_observed(tmp_path: Path) -> None:
    command = [*COMMAND, "--resume-args", "--resume last.pt", "--", sys.executable, "-c", "pass"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "expected --observe with them" in done.stderr
