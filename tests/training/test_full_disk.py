"""A real disk that fills up under a run: it waits, goes on without saving, or ends, as it was told."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import unbroken
from unbroken.checkpoint.store import CheckpointStore
from unbroken.cli.describe import describe_run
from unbroken.errors import StorageFullError, UsageError
from unbroken.rundir import layout
from unbroken.rundir.heartbeat import Beat, read_heartbeat
from unbroken.rundir.journal import read_events
from unbroken.testing.runs import compare_runs
from unbroken.training.full_disk import FullDisk

from ..durability.disks import MEBIBYTE, FileSystem, room_for_disks
from .processes import step_events
from .saving import finish, start
from .test_supervised import unbroken as cli

STATE = ["--size-mb", "1.5", "--save-every", "10", "--step-seconds", "0.003"]
PATIENCE_SECONDS = 60.0
# Found out by looking, or by writing.
NO_SPACE = re.compile(r"No space left on device|bytes and \d+ files to be free")

Make = Callable[..., Path]


@pytest.fixture
def make_disk(tmp_path: Path) -> Iterator[Make]:
    def make(*options: str) -> Path:
        disk = FileSystem("ext4", tmp_path / "memory/disk", tmp_path / "disk", 24 * MEBIBYTE, *options)
        disk.mount()
        return disk.place

    with room_for_disks(tmp_path, "ext4"):
        yield make


class Training:
    """A run on the disk at `place`, in a process of its own, and what fills that disk."""

    def __init__(self, place: Path, *arguments: str) -> None:
        self.run_dir = place / "run"
        self.filler = place / "filler"
        self.output = place.parent / "output"
        self.process = start(self.run_dir, *STATE, *arguments, output=self.output)

    def beat(self) -> Beat | None:
        return read_heartbeat(layout.attempt_directory(self.run_dir, 1) / layout.HEARTBEAT)

    def until(self, is_so: Callable[[Beat], bool]) -> Beat:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (beat := self.beat()) is None or not is_so(beat):
            if time.monotonic() > deadline:
                self.process.kill()
                pytest.fail(f"it does not come to that: {beat} {self.output.read_text()}")
            time.sleep(0.005)
        return beat

    def until_after(self, beats: int) -> Beat:
        return self.until(lambda beat: beat.beats > beats)

    def fill_up(self) -> None:
        """Once it has saved, leave no byte free."""
        self.until(lambda beat: beat.checkpoint_step >= 10)
        with self.filler.open("ab", buffering=0) as file:
            for size in (MEBIBYTE, 4096, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    continue

    def fill_up_until_it_waits(self) -> Beat:
        """Leave no byte free; return its beat when it waits, and cannot save whatever it tries.

        A save that fails removes what it had written, so that the next one may find just enough.
        """
        while True:
            self.fill_up()
            beats = self.until(lambda beat: beat.phase == "disk-full").beats
            beat = self.until_after(beats)
            if beat.phase == "disk-full" and os.statvfs(self.run_dir).f_bavail == 0:
                return beat

    def use_up_inodes(self) -> None:
        self.until(lambda beat: beat.checkpoint_step >= 10)
        self.filler.mkdir()
        with pytest.raises(OSError, match="No space"):
            for number in range(10_000):
                (self.filler / str(number)).touch()

    def make_room(self) -> None:
        if self.filler.is_dir():
            for path in self.filler.iterdir():
                path.unlink()
        else:
            self.filler.unlink()

    def wait(self, code: int = 0) -> str:
        """Return what it printed when it has ended by that exit code."""
        assert self.process.wait(timeout=PATIENCE_SECONDS) == code, self.output.read_text()
        return self.output.read_text()


def check_intact(run_dir: Path) -> list[int]:
    store = CheckpointStore(run_dir)
    assert sorted(os.listdir(run_dir / layout.CHECKPOINTS)) == store.names()
    for name in store.names():
        assert store.is_intact(name)
    return [store.get(name).step for name in store.names()]


@pytest.fixture
def expected(tmp_path: Path) -> Callable[[int], Path]:
    """Return a function that gives the same run, undisturbed."""

    def train(steps: int) -> Path:
        run_dir = tmp_path / "expected"
        arguments = [*STATE, "--step-seconds", "0", "--steps", str(steps)]
        finish(run_dir, *arguments, output=tmp_path / "output-expected")
        return run_dir

    return train


class TestPause:
    def test_it_waits_and_goes_on_by_itself_when_there_is_space(
        self, make_disk: Make, expected: Callable[[int], Path]
    ) -> None:
        training = Training(make_disk(), "--steps", "150")
        waiting = training.fill_up_until_it_waits()
        shown = describe_run(training.run_dir)
        hint = f"free space on the disk of {training.run_dir}; training waits and goes on by itself"
        assert (shown["phase"], shown["hint"]) == ("disk-full", hint)
        text = cli("status", str(training.run_dir), state_home=training.output.with_name("state")).stdout
        assert f"hint        {hint}\n" in text
        assert ", disk-full, " in text
        training.until(lambda beat: beat.beats > waiting.beats)
        training.make_room()
        said = training.wait()
        assert "training waits for space to write" in said
        assert NO_SPACE.search(said)
        assert "training goes on" in said
        assert [event["step"] for event in step_events(training.run_dir)] == list(range(1, 151))
        assert compare_runs(expected(150), training.run_dir).differences == ()
        assert check_intact(training.run_dir) == [130, 140, 150]
        assert describe_run(training.run_dir)["hint"] is None

    def test_it_waits_for_inodes_as_well(self, make_disk: Make, expected: Callable[[int], Path]) -> None:
        training = Training(make_disk("-N", "128"), "--steps", "60")
        training.use_up_inodes()
        training.until(lambda beat: beat.phase == "disk-full")
        training.make_room()
        training.wait()
        assert compare_runs(expected(60), training.run_dir).differences == ()
        assert check_intact(training.run_dir) == [40, 50, 60]

    def test_a_stop_while_it_waits_is_an_error_and_costs_no_checkpoint(
        self, make_disk: Make, expected: Callable[[int], Path]
    ) -> None:
        training = Training(make_disk(), "--steps", "150")
        training.fill_up_until_it_waits()
        training.process.terminate()
        said = training.wait(code=1)
        assert NO_SPACE.search(said)
        shown = describe_run(training.run_dir)
        assert (shown["phase"], shown["hint"]) == ("disk-full", None)
        training.make_room()
        last = training.until(lambda _: True)
        assert check_intact(training.run_dir)[-1] == last.checkpoint_step < last.step
        finish(training.run_dir, *STATE, "--steps", "60", output=training.output)
        assert compare_runs(expected(60), training.run_dir).differences == ()


class TestGoOn:
    def test_it_trains_on_says_so_once_and_saves_again_when_there_is_space(
        self, make_disk: Make, expected: Callable[[int], Path]
    ) -> None:
        training = Training(make_disk(), "--full-disk", "go-on", "--steps", "300")
        training.fill_up()
        full = training.until(lambda _: "a checkpoint could not be written" in training.output.read_text())
        training.until(lambda beat: beat.step > full.step + 30)
        training.make_room()
        freed = training.until(lambda beat: beat.checkpoint_step > full.step + 20)
        assert freed.phase != "disk-full"
        said = training.wait()
        assert said.count("a checkpoint could not be written, training goes on without") == 1
        assert check_intact(training.run_dir) == [280, 290, 300]
        final, wanted = CheckpointStore(training.run_dir).latest(), CheckpointStore(expected(300)).latest()
        assert final.manifest.tensors == wanted.manifest.tensors

    def test_a_final_state_that_cannot_be_saved_is_an_error(self, make_disk: Make) -> None:
        training = Training(make_disk(), "--full-disk", "go-on", "--steps", "60")
        training.fill_up()
        said = training.wait(code=1)
        assert "the last state could not be saved, the disk is full" in said
        assert "free space, then start the run again" in said
        training.make_room()
        assert check_intact(training.run_dir)[-1] < 60


def test_with_fail_the_run_fails_and_the_checkpoints_are_intact(make_disk: Make) -> None:
    training = Training(make_disk(), "--full-disk", "fail", "--steps", "1000")
    training.fill_up()
    said = training.wait(code=1)
    assert "SaveFailedError" in said or "StorageFullError" in said
    assert NO_SPACE.search(said)
    training.make_room()
    assert check_intact(training.run_dir)
    assert len(list(read_events(layout.attempt_directory(training.run_dir, 1) / layout.events_file()))) >= 10


class TestPolicy:
    def full_disk(self, policy: Any, *, beats: list[str] | None = None) -> FullDisk:
        beat = [].append if beats is None else beats.append
        return FullDisk(policy, beat=beat, is_asked_to_stop=lambda: False, retry_seconds=0.001)

    def test_an_unknown_one_is_refused_with_those_there_are(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"\('pause', 'go-on', 'fail'\), found 'wait'"):
            unbroken.Run(tmp_path, full_disk="wait")  # type: ignore[arg-type]

    def test_going_on_is_said_once_of_each_thing_and_counted_every_time(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        disk = self.full_disk("go-on")
        for what in ("the journal", "a checkpoint", "the journal", "a checkpoint"):
            assert disk.write(full, what) is None
        assert disk.given_up == 4
        lines = capsys.readouterr().err.splitlines()
        assert [line.partition(" could not")[0] for line in lines] == [
            "unbroken: the journal",
            "unbroken: a checkpoint",
        ]

    def test_a_pause_tries_again_until_it_works_and_returns_what_is_wanted(self) -> None:
        beats: list[str] = []
        tries = iter([full, full, lambda: 7])

        def try_again() -> Any:
            return next(tries)()

        assert self.full_disk("pause", beats=beats).write(try_again, "a checkpoint") == 7
        assert beats == ["disk-full", "disk-full", "training"]

    def test_with_fail_the_error_is_the_one_of_the_disk(self) -> None:
        with pytest.raises(StorageFullError):
            self.full_disk("fail").write(full, "a checkpoint")


def full() -> Any:
    raise StorageFullError("stage x: No space left on device", hint="free space")
