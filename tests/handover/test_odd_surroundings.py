"""The writer process where the surroundings of the trainer are not the usual ones."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from unbroken.checkpoint.store import CheckpointStore
from unbroken.handover import child
from unbroken.handover.client import WriterHere, start_writer
from unbroken.rundir.identity import new_attempt, open_run

from .states import small_state
from .trainers import Trainer, Work, names, wait_for, writer_of

pytestmark = pytest.mark.usefixtures("adopting")


def before(prepare: Callable[[], None], work: Callable[[Work], None]) -> Callable[[Work], None]:
    """Do `prepare` in the trainer, whose writer process then starts anew, before `work`."""

    def both(at: Work) -> None:
        at.writer.close()
        prepare()
        at.writer = type(at.writer)(at.attempt.directory.parents[1], at.attempt.number)
        work(at)

    return both


def commit_and_die(at: Work) -> None:
    at.commit(1)
    at.fill(2, index=1)
    os.kill(os.getpid(), signal.SIGKILL)


def check_saved(directory: Path, step: int) -> None:
    checkpoint = CheckpointStore(directory).get(f"step-{step:08d}")
    assert checkpoint.verify().is_intact
    assert checkpoint.load() == small_state(step)


@pytest.mark.parametrize("closed", [(2,), (0,), (0, 1, 2)], ids=str)
def test_closed_standard_streams_are_no_obstacle(tmp_path: Path, closed: tuple[int, ...]) -> None:
    def close() -> None:
        for descriptor in closed:
            os.close(descriptor)

    assert Trainer(tmp_path, before(close, commit_and_die)).wait() == -signal.SIGKILL
    assert wait_for(writer_of(tmp_path)) == 0
    check_saved(tmp_path, 2)


def test_modules_of_the_users_directory_do_not_take_the_place_of_the_standard_ones(tmp_path: Path) -> None:
    place = tmp_path / "scripts"
    place.mkdir()
    for name in ("ctypes", "json", "socket", "select", "platform", "msgspec", "unbroken"):
        (place / f"{name}.py").write_text("raise SystemExit('the wrong module')")

    def enter() -> None:
        os.chdir(place)
        os.environ["PYTHONPATH"] = str(place)

    assert Trainer(tmp_path / "run", before(enter, commit_and_die)).wait() == -signal.SIGKILL
    assert wait_for(writer_of(tmp_path / "run")) == 0
    check_saved(tmp_path / "run", 2)


def test_a_directory_of_work_that_is_gone_is_no_obstacle(tmp_path: Path) -> None:
    def leave() -> None:
        (tmp_path / "gone").mkdir()
        os.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()

    assert Trainer(tmp_path, before(leave, commit_and_die)).wait() == -signal.SIGKILL
    assert wait_for(writer_of(tmp_path)) == 0
    check_saved(tmp_path, 2)


@pytest.mark.parametrize(
    ("executable", "why"),
    [
        (None, "no Python interpreter of its own"),
        ("", "no Python interpreter of its own"),
        ("/nowhere/python", "No such file"),
        ("/dev/null", "Permission denied"),
        ("/bin/true", "ended by exit code 0"),
        ("silent", "has said nothing"),
    ],
)
def test_without_an_interpreter_training_writes_itself_and_says_so(
    tmp_path: Path, executable: str | None, why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 600\n")
    silent.chmod(0o755)

    def lose_it() -> None:
        sys.executable = str(silent) if executable == "silent" else executable  # type: ignore[assignment]
        child._START_SECONDS = 0.2

    def work(at: Work) -> None:
        assert at.commit(1) == "step-00000001"
        assert at.writer.is_intact("step-00000001")
        at.fill(2, index=1)
        at.commit(3)
        at.close()

    assert Trainer(tmp_path, before(lose_it, work)).wait() == 0
    assert names(tmp_path) == ["step-00000001", "step-00000003"]
    check_saved(tmp_path, 3)
    said = capfd.readouterr().err
    assert said.count("no process to write checkpoints") == 1
    assert why in said
    assert "its snapshots do not outlive it" in said


def test_a_small_state_that_need_not_outlive_its_process_is_written_in_it(tmp_path: Path) -> None:
    open_run(tmp_path)
    writer = start_writer(tmp_path, new_attempt(tmp_path), size_bytes=1000, outlives=False)
    assert isinstance(writer, WriterHere)
    writer.close()


def test_where_there_is_no_proc_it_stays_until_the_trainer_dies(tmp_path: Path) -> None:
    def hide_proc() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        new_namespace, private_below = 0x20000, 0x44000
        for failed in (
            lambda: libc.unshare(new_namespace),
            lambda: libc.mount(None, b"/", None, ctypes.c_ulong(private_below), None),
            lambda: libc.mount(b"tmpfs", b"/proc", b"tmpfs", ctypes.c_ulong(0), None),
        ):
            if failed():
                os._exit(77)
        assert os.listdir("/proc") == []

    def work(at: Work) -> None:
        at.commit(1)
        process_id = at.writer_id()
        # Longer than it goes without a look at the trainer.
        time.sleep(1.3)
        at.commit(2)
        assert at.writer_id() == process_id
        at.fill(3, index=1)
        at.say(process_id)
        os.kill(os.getpid(), signal.SIGKILL)

    def run(at: Work) -> None:
        at.close()
        hide_proc()
        again = Work(tmp_path, at.line)
        work(again)

    trainer = Trainer(tmp_path, run)
    try:
        process_id = trainer.hear()
    except AssertionError:
        if trainer.wait() == 77:
            pytest.skip("only root may hide /proc from a process")
        raise
    assert trainer.wait() == -signal.SIGKILL
    assert wait_for(process_id) == 0
    check_saved(tmp_path, 3)


def test_a_forked_child_that_closes_its_copy_leaves_the_process_to_its_parent(tmp_path: Path) -> None:
    def work(at: Work) -> None:
        at.commit(1)
        process_id = at.writer_id()
        forked = os.fork()
        if forked == 0:
            at.close()
            for slot in at.slots:
                slot.close()
            del at.writer, at.slots
            gc.collect()
            os._exit(0)
        assert os.waitpid(forked, 0)[1] == 0
        at.commit(2)
        assert at.writer_id() == process_id
        at.fill(3, index=1)
        os.kill(os.getpid(), signal.SIGKILL)

    assert Trainer(tmp_path, work).wait() == -signal.SIGKILL
    assert wait_for(writer_of(tmp_path)) == 0
    check_saved(tmp_path, 3)
