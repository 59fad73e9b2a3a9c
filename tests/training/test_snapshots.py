"""Snapshots: a process that dies loses no more than the steps since the last one."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unbroken
from unbroken.checkpoint.digest import digest
from unbroken.checkpoint.store import CheckpointStore
from unbroken.handover.client import WriterProcess
from unbroken.rundir import layout
from unbroken.rundir.journal import read_events
from unbroken.rundir.writers import wait_for_writers
from unbroken.testing.runs import compare_runs

from .processes import train
from .runs import names, steps, words_of
from .saving import SCRIPT, finish
from .test_saving import stopped
from .test_supervised import unbroken as cli
from .test_supervised import verdicts

SNAPSHOTS = ["--snapshot-every", "1", "--save-every", "50"]


def events(run_dir: Path, attempt: int, kind: str) -> list[dict[str, Any]]:
    place = layout.attempt_directory(run_dir, attempt) / layout.events_file()
    return [event for event in read_events(place) if event["kind"] == kind]


def newest_step(run_dir: Path) -> int:
    newest = CheckpointStore(run_dir).latest()
    assert newest.verify().is_intact
    return newest.step


def end_by(run_dir: Path, *arguments: str, code: int) -> dict[str, int]:
    """Let an attempt end in a disaster, and its writer process, too; return what the attempt said."""
    finish(run_dir, *SNAPSHOTS, *arguments, output=run_dir.with_suffix(".output"), code=code)
    return what_is_left(run_dir)


def what_is_left(run_dir: Path) -> dict[str, int]:
    wait_for_writers(run_dir)
    said: dict[str, int] = json.loads(run_dir.with_suffix(".said").read_text())
    return said


class TestDeath:
    @pytest.mark.parametrize(
        ("disaster", "code"), [("kill", -signal.SIGKILL), ("segfault", -signal.SIGSEGV), ("leave", 3)]
    )
    def test_the_last_step_is_kept(self, tmp_path: Path, disaster: str, code: int) -> None:
        said = end_by(tmp_path / "run", f"--{disaster}-at", "8", code=code)
        assert said == {"step": 7, "captured": 7}
        assert names(tmp_path / "run") == ["step-00000007"]
        assert newest_step(tmp_path / "run") == 7

    @pytest.mark.chaos
    def test_killed_at_random_steps_it_goes_on_from_the_last_snapshot_and_is_bit_identical(
        self, tmp_path: Path
    ) -> None:
        run_dir, expected, dice = tmp_path / "run", tmp_path / "expected", random.Random(3)
        arguments = [*SNAPSHOTS, "--torch", "--steps", "160"]
        # Also right after a save began, which may still be going on.
        moments = sorted({dice.randrange(2, 150), 51, 102})
        lost = []
        for moment in moments:
            done = train(run_dir, *arguments, "--kill-at", str(moment), script=SCRIPT)
            assert done.returncode == -signal.SIGKILL, done.stderr
            said = what_is_left(run_dir)
            assert newest_step(run_dir) == said["captured"]
            lost.append(said["step"] - said["captured"])
        assert lost.count(0) >= 2
        assert train(run_dir, *arguments, script=SCRIPT).returncode == 0
        assert train(expected, *arguments, script=SCRIPT).returncode == 0
        comparison = compare_runs(expected, run_dir)
        assert comparison.differences == ()
        assert comparison.repeated_steps <= sum(lost) + len(moments)

    def test_an_exception_in_the_script_makes_a_checkpoint_of_the_last_snapshot(self, tmp_path: Path) -> None:
        run_dir = tmp_path / "run"
        said = finish(run_dir, *SNAPSHOTS, "--raise-at", "8", output=tmp_path / "output", code=1)
        assert "a bug of the user" in said
        assert newest_step(run_dir) == 7
        words = words_of(run_dir)
        assert (words.ending, words.checkpoint, words.kind) == ("failed", "step-00000007", "RuntimeError")

    def test_a_forked_child_that_leaves_the_block_ends_nothing_of_its_parent(self, tmp_path: Path) -> None:
        said = end_by(tmp_path / "run", "--fork-at", "4", "--kill-at", "8", code=-signal.SIGKILL)
        assert newest_step(tmp_path / "run") == said["captured"] == 7

    def test_under_a_supervisor_the_writer_is_waited_for_and_no_leftover(self, tmp_path: Path) -> None:
        run_dir = tmp_path / "run"
        command = [sys.executable, str(SCRIPT), *SNAPSHOTS, "--steps", "30", "--size-mb", "8"]
        done = cli(
            *("run", "--run-dir", str(run_dir), "--backoff", "0.01", "--"),
            *(*command, "--plan", "kill:8,segfault:20"),
            state_home=tmp_path / "state",
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert [verdict["outcome"] for verdict in verdicts(run_dir)] == ["killed", "signalled", "completed"]
        assert [events(run_dir, attempt, "began")[0]["step"] for attempt in (1, 2, 3)] == [0, 7, 19]
        told = list(read_events(run_dir / layout.JOURNAL_FILE))
        assert {"attempt-started", "leftovers-ended"} & {event["kind"] for event in told} == {
            "attempt-started"
        }
        assert all("left" not in line for verdict in verdicts(run_dir) for line in verdict["evidence"])


class TestPointInTime:
    def test_what_is_changed_in_place_after_the_call_is_not_in_the_snapshot(self, tmp_path: Path) -> None:
        tensor, strided = torch.arange(100.0), torch.arange(64.0).reshape(8, 8).t()
        half, large = torch.ones(7, dtype=torch.bfloat16), torch.zeros(3 << 20)
        array, fortran = np.arange(50), np.asfortranarray(np.arange(12.0).reshape(3, 4))
        tensors = {"t": tensor, "s": strided, "h": half, "l": large}
        arrays = {"a": array, "f": fortran, "v": np.arange(20)[::2]}
        history: list[Any] = [1, [2, {"x": 3}]]
        nested: dict[str, Any] = {"deep": {"list": [1, 2], "set": [7]}, "n": 0}
        expected = digests(tensors | arrays)
        with (
            pytest.raises(ZeroDivisionError),
            unbroken.Run(
                tmp_path,
                save=[],
                snapshot=[unbroken.EverySteps(1)],
                tensors=tensors,
                arrays=arrays,
                history=history,
                nested=nested,
            ) as run,
        ):
            run.step()
            for changed in tensors.values():
                changed.add_(1)
            for counted in arrays.values():
                np.add(counted, 1, out=counted)
            history[1][1]["x"] = 4
            history.append(5)
            nested["deep"]["list"].append(3)
            nested["n"] = 1
            raise ZeroDivisionError
        checkpoint = CheckpointStore(tmp_path).get("step-00000001")
        found = {path: entry.digest for path, entry in checkpoint.manifest.tensors.items()}
        assert {name: found[name] for name in expected} == expected
        state = checkpoint.load()
        assert state["history"] == [1, [2, {"x": 3}]]
        assert state["nested"] == {"deep": {"list": [1, 2], "set": [7]}, "n": 0}

    def test_one_that_would_overwrite_the_newest_waits_while_the_other_is_written(
        self, tmp_path: Path
    ) -> None:
        with pytest.raises(ZeroDivisionError), in_memory(tmp_path) as run:
            steps(run, 1)
            writer = run._saver._writer
            assert isinstance(writer, WriterProcess)
            assert writer._child is not None
            with stopped(writer._child.process_id):
                run.save()
                steps(run, 1)
                assert captured(run) == 2
                steps(run, 3)
                assert captured(run) == 2
            run._saver.wait()
            steps(run, 1)
            assert captured(run) == 6
            raise ZeroDivisionError
        assert names(tmp_path) == ["step-00000001", "step-00000006"]

    def test_a_snapshot_of_a_state_that_is_saved_already_makes_no_further_checkpoint(
        self, tmp_path: Path
    ) -> None:
        with pytest.raises(ZeroDivisionError), in_memory(tmp_path) as run:
            steps(run, 2)
            run.save()
            raise ZeroDivisionError
        assert names(tmp_path) == ["step-00000002"]

    def test_at_the_end_there_is_one_checkpoint_and_nothing_else_is_left(self, tmp_path: Path) -> None:
        gc.collect()
        before, mapped = open_files(), mapped_slots()
        with in_memory(tmp_path) as run:
            steps(run, 3)
        assert names(tmp_path) == ["step-00000003"]
        assert open_files() == before
        assert mapped_slots() == mapped
        with pytest.raises(ChildProcessError):
            os.waitpid(writer_id(tmp_path), os.WNOHANG)


def in_memory(directory: Path) -> unbroken.Run:
    return unbroken.Run(directory, save=[], snapshot=[unbroken.EverySteps(1)], state={"x": torch.zeros(3)})


def open_files() -> dict[str, str]:
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        # The descriptor of the listing itself is gone.
        with suppress(FileNotFoundError):
            found[entry] = os.readlink(f"/proc/self/fd/{entry}")
    # That one is closed by a thread that may be about to end.
    return {entry: place for entry, place in found.items() if not place.endswith(".lease (deleted)")}


def mapped_slots() -> int:
    return Path("/proc/self/maps").read_text().count("unbroken-snapshot")


def captured(run: unbroken.Run) -> int:
    return run._saves._snapshot_due._step


def writer_id(directory: Path) -> int:
    words = json.loads((layout.attempt_directory(directory, 1) / layout.WRITER_PROCESS).read_text())
    return int(words["process_id"])


def digests(values: dict[str, Any]) -> dict[str, str]:
    part = {True: "tensors", False: "arrays"}
    return {
        f"{part[isinstance(value, torch.Tensor)]}/{name}": digest(raw_bytes(value))
        for name, value in values.items()
    }


def raw_bytes(value: Any) -> bytes:
    array = value.contiguous().view(torch.uint8).numpy() if isinstance(value, torch.Tensor) else value
    return np.ascontiguousarray(array).tobytes()
