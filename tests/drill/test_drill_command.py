"""`unbroken drill` with real processes of a script that follows the contract and needs no framework."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "scripts/standin.py"
COMMAND = [sys.executable, "-P", "-m", "unbroken.cli.main", "drill"]
# Two deaths tell nearly as much as seven.
FEW = ("--steps", "9", "--at", "3", "--at", "6:in-save")


class Place:
    """A directory of the user's, and one for what is temporary."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path / "temporary"
        self.temporary.mkdir()
        self.environment = {
            **os.environ,
            "TMPDIR": str(self.temporary),
            "UNBROKEN_RUN_DIR": str(path / "the-run-of-the-user"),
            "UNBROKEN_ATTEMPT": "7",
        }

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=self.path,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def drill(self, *arguments: str, leak: str = "none") -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, "--", sys.executable, str(SCRIPT), leak)
        said, told = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, said, told)

    def fields(self, leak: str, *arguments: str) -> dict[str, Any]:
        done = self.drill("--json", *(arguments or FEW), leak=leak)
        found: dict[str, Any] = json.loads(done.stdout)
        assert found["exit_code"] == done.returncode
        return found

    def strays(self) -> list[int]:
        """Processes that were started for us and live: they know where our temporary files are."""
        tag = f"TMPDIR={self.temporary}".encode()
        return [number for number in _numbers() if tag in _environment_of(number)]


def _numbers() -> Iterator[int]:
    yield from (int(entry) for entry in os.listdir("/proc") if entry.isdecimal())


def _environment_of(number: int) -> list[bytes]:
    try:
        return Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_script_that_resumes_exactly_is_proven_and_leaves_nothing_behind(place: Place) -> None:
    done = place.drill()
    assert done.returncode == 0, done.stderr
    first, *more = done.stdout.splitlines()
    assert first == "PROVEN: bit-identical over 7 kills (40 steps, 4 components)"
    assert more == ["  the moment of SIGKILL in-evaluation from step 27 on never came"]
    assert list(place.path.iterdir()) == [place.temporary]
    assert list(place.temporary.iterdir()) == []
    assert not place.strays()


def test_progress_goes_to_stderr_a_line_for_each_phase(place: Place) -> None:
    done = place.drill(*FEW)
    assert done.returncode == 0
    lines = done.stderr.splitlines()
    assert lines[0].startswith("unbroken: reference: 9 steps in ")
    assert lines[1].startswith("unbroken: second reference: 9 steps in ")
    assert lines[2] == "unbroken: first process, SIGKILL after-step 3: from the beginning to 3, killed"
    assert lines[-1].endswith("to 9, complete")
    assert len(lines) == 5
    assert "\r" not in done.stderr


def test_what_is_in_no_part_is_named_and_proved(place: Place) -> None:
    done = place.drill(*FEW, leak="forget")
    assert done.returncode == 1
    assert done.stdout.startswith("NOT EXACT: step ")
    assert "cause, proved by putting it back: `found/__main__.hidden` is in no part of the run" in done.stdout


@pytest.mark.parametrize(
    ("leak", "causes", "words"),
    [
        ("two", ["found/__main__.hidden", "found/__main__.second"], "is in no part"),
        pytest.param("skip", ["rng/python"], "batch content differs", marks=pytest.mark.chaos),
        pytest.param("rounded", ["optimizer"], "had another value", marks=pytest.mark.chaos),
    ],
)
def test_each_cause_is_found_by_putting_it_back(
    place: Place, leak: str, causes: list[str], words: str
) -> None:
    found = place.fields(leak)
    assert found["verdict"] == "not-exact"
    assert found["causes"] == causes
    assert found["repeatable"] is True
    assert words in found["headline"]


@pytest.mark.chaos
def test_a_rate_that_is_set_after_the_restore_is_named(place: Place) -> None:
    found = place.fields("rate")
    assert found["divergence"]["rates_not_restored"] == {"reference": [0.5], "other": [0.25]}
    assert "learning rate 0.5 became 0.25" in found["headline"]


def test_a_counter_that_has_no_effect_does_not_spoil_the_proof_but_is_named(place: Place) -> None:
    found = place.fields("unused")
    assert found["verdict"] == "proven"
    assert list(found["unkept"]) == ["found/__main__.count"]
    assert "`found/__main__.count`" in found["headline"]


@pytest.mark.chaos
def test_what_differs_in_every_process_without_effect_is_left_out(place: Place) -> None:
    found = place.fields("clock")
    assert found["verdict"] == "proven"
    assert list(found["noise"]["components"]) == ["found/__main__.count"]
    assert found["unkept"] == {}


def test_a_script_that_is_not_deterministic_is_undecided_with_its_noise(place: Place) -> None:
    found = place.fields("random")
    assert found["verdict"] == "undecided"
    assert found["noise"]["of_training"] is True
    assert found["noise"]["first_step"] == 1
    assert found["noise"]["metrics"]["loss"] > 0
    assert found["hash_order"] is False
    assert [process["killed"] for process in found["processes"]] == [True, True, False]


@pytest.mark.chaos
def test_the_order_of_a_set_is_proved_to_be_why_a_script_is_not_deterministic(place: Place) -> None:
    place.environment.pop("PYTHONHASHSEED", None)
    found = place.fields("hash-order")
    assert found["verdict"] == "undecided"
    assert found["hash_order"] is True
    assert "proved by setting PYTHONHASHSEED" in found["headline"]


@pytest.mark.chaos
def test_what_happens_by_chance_is_not_blamed_on_anything(place: Place) -> None:
    found = place.fields("chance")
    assert found["verdict"] == "not-exact"
    assert found["repeatable"] is False
    assert found["causes"] == []
    assert "did not come again" in found["headline"]


def test_a_resume_that_fails_is_reported_with_the_end_of_its_output(place: Place) -> None:
    done = place.drill(*FEW, leak="crash")
    assert done.returncode == 1
    assert done.stdout.startswith(
        "FAILED: resume 1, after SIGKILL after-step 3, ended at step 0 with exit code 1"
    )
    assert "RuntimeError: cannot read <b>my</b> own checkpoint" in done.stdout


def test_a_resume_that_hangs_is_ended_and_reported(place: Place) -> None:
    found = place.fields("hang", *FEW, "--timeout", "1")
    assert found["verdict"] == "failed"
    assert "hung at step" in found["failure"]
    assert not place.strays()


@pytest.mark.chaos
def test_a_run_that_never_restores_proves_nothing(place: Place) -> None:
    found = place.fields("forgets-all")
    assert found["verdict"] == "undecided"
    assert found["restored"] == 0


def test_a_script_without_a_run_is_a_usage_error(place: Place) -> None:
    done = place.drill(leak="no-run")
    assert done.returncode == 2
    assert "no step was recorded: the script does not use unbroken.Run" in done.stderr
    assert done.stdout == ""


@pytest.mark.chaos
def test_a_script_that_is_shorter_is_rehearsed_over_what_it_has(place: Place) -> None:
    found = place.fields("short", "--kills", "2")
    assert found["verdict"] == "proven"
    assert found["steps"] == 12


def test_a_script_that_cannot_even_start_fails_by_name(place: Place) -> None:
    process = place.start("--", sys.executable, "no-such-script.py")
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert said.startswith("FAILED: an undisturbed run ended at step 0 with exit code 2")
    assert "no-such-script.py" in said


@pytest.mark.chaos
def test_any_command_can_be_rehearsed(place: Place) -> None:
    command = f"exec {sys.executable} {SCRIPT} none"
    process = place.start(*FEW, "--", "sh", "-c", command)
    said, told = process.communicate(timeout=60)
    assert process.returncode == 0, told
    assert said.startswith("PROVEN")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--at", "14", "--steps", "14"), "expected a step before the last one"),
        (("--at", "3:lunch"), "expected a step, then a moment or a signal"),
        (("--html", "no/such/place.html"), "its directory does not exist"),
        (("--keep", "."), "expected an empty directory"),
    ],
)
def test_a_wrong_option_is_a_usage_error(place: Place, arguments: tuple[str, ...], words: str) -> None:
    done = place.drill(*arguments)
    assert done.returncode == 2
    assert words in done.stderr


def test_all_that_was_written_can_be_kept_and_shown(place: Place) -> None:
    done = place.drill(*FEW, "--keep", "kept", "--html", "drill.html", leak="forget")
    assert done.returncode == 1
    names = {path.name for path in (place.path / "kept").iterdir()}
    assert {"processes", "reference", "second-reference", "killed", "values", "before-1"} <= names
    shown = (place.path / "drill.html").read_text()
    assert "NOT EXACT" in shown
    assert shown.count("<title>SIGKILL") == 2


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.chaos)])
def test_an_interrupt_ends_all_processes_and_removes_all_files(place: Place, number: int) -> None:
    process = place.start("--timeout", "60", "--", sys.executable, str(SCRIPT), "sleeps")
    # It sleeps beside a child that made a session of its own.
    until = time.monotonic() + 30
    while len(place.strays()) < 3 and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert not place.strays()
    assert list(place.temporary.iterdir()) == []


@pytest.mark.chaos
def test_what_a_killed_process_leaves_is_ended_before_the_next_begins(place: Place) -> None:
    found = place.fields("grandchildren")
    assert found["verdict"] == "proven"
    assert not place.strays()
