"""The writer process where the surroundings of the trainer are not the usual ones."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from unbroken.handover import child
from unbroken.handover.client import WriterHere, start_writer
from unbroken.handover.slots import Slot
from unbroken.rundir.identity import new_attempt, open_run
from unbroken.training.attempt import Attempt

from .states import described, small_state
from .trainers import Trainer, Work, check_saved, names, wait_for, writer_of

pytestmark = pytest.mark.usefixtures("adopting")


def commit_and_die(at: Work) -> None:
    at.commit(1)
    at.fill(2, index=1)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("closed", [(2,), (0,), (0, 1, 2)], ids=str)
def test_closed_standard_streams_are_no_obstacle(tmp_path: Path, closed: tuple[int, ...]) -> None:
    def close() -> None:
        for descriptor in closed:
            os.close(descriptor)

    def work(at: Work) -> None:
        at.commit(1)
        if 2 in closed:
            # Not a file that this process opened since, which a dying interpreter would write into.
            assert os.readlink(f"/proc/{at.writer_id()}/fd/2") == os.devnull
        at.fill(2, index=1)
        os.kill(os.getpid(), signal.SIGKILL)

    assert Trainer(tmp_path, work, prepare=close).wait() == -signal.SIGKILL
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

    assert Trainer(tmp_path / "run", commit_and_die, prepare=enter).wait() == -signal.SIGKILL
    assert wait_for(writer_of(tmp_path / "run")) == 0
    check_saved(tmp_path / "run", 2)


def test_a_directory_of_work_that_is_gone_is_no_obstacle(tmp_path: Path) -> None:
    def leave() -> None:
        (tmp_path / "gone").mkdir()
        os.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()

    assert Trainer(tmp_path, commit_and_die, prepare=leave).wait() == -signal.SIGKILL
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

    assert Trainer(tmp_path, work, prepare=lose_it).wait() == 0
    assert names(tmp_path) == ["step-00000001", "step-00000003"]
    check_saved(tmp_path, 3)
    said = capfd.readouterr().err
    assert said.count("no process to write checkpoints") == 1
    assert why in said
    assert "its snapshots do not outlive it" in said


def test_a_small_state_that_need_not_outlive_its_process_is_written_in_it(tmp_path: Path) -> None:
    open_run(tmp_path)
    writer = start_writer(tmp_path, new_attempt(tmp_path), size_bytes=1000, outlives=False, parent=None)
    assert isinstance(writer, WriterHere)
    writer.close()


LIBC = ctypes.CDLL(None, use_errno=True)
NEW_MOUNTS, NEW_NAMES, NEW_PROCESSES = 0x20000, 0x4000000, 0x20000000
PRIVATE_BELOW = 0x44000
MAY_NOT = 77


def separate(namespaces: int) -> None:
    """Give this process namespaces of its own, or end it."""
    if LIBC.unshare(namespaces):
        os._exit(MAY_NOT)
    # What is mounted from here on must not show outside; without mounts of our own this is outside.
    if namespaces & NEW_MOUNTS and LIBC.mount(None, b"/", None, ctypes.c_ulong(PRIVATE_BELOW), None):
        os._exit(MAY_NOT)


def hear(trainer: Trainer) -> int:
    """Return the number that `trainer` says; skip the test if it may not do what that takes."""
    try:
        return int(trainer.hear())
    except AssertionError:
        if trainer.wait() == MAY_NOT:
            pytest.skip("only root may separate a process from the others")
        raise


def test_where_there_is_no_proc_it_stays_until_the_trainer_dies(tmp_path: Path) -> None:
    def hide_proc() -> None:
        separate(NEW_MOUNTS)
        assert LIBC.mount(b"tmpfs", b"/proc", b"tmpfs", ctypes.c_ulong(0), None) == 0
        assert os.listdir("/proc") == []

    def work(before: Work) -> None:
        # As it would have named itself here from the start.
        before.close()
        at = Work(tmp_path, Attempt(tmp_path), before.line)
        at.commit(1)
        process_id = at.writer_id()
        # Longer than it goes without a look at the trainer.
        time.sleep(1.3)
        at.commit(2)
        assert at.writer_id() == process_id
        at.fill(3, index=1)
        at.say(process_id)
        os.kill(os.getpid(), signal.SIGKILL)

    trainer = Trainer(tmp_path, work, prepare=hide_proc)
    process_id = hear(trainer)
    assert trainer.wait() == -signal.SIGKILL
    assert wait_for(process_id) == 0
    check_saved(tmp_path, 3)


def test_another_name_of_the_host_is_no_other_trainer(tmp_path: Path) -> None:
    def work(at: Work) -> None:
        at.commit(1)
        assert LIBC.sethostname(b"renamed", 7) == 0
        time.sleep(1.3)
        at.commit(2)
        process_id = at.writer_id()
        os.kill(process_id, signal.SIGKILL)
        os.waitid(os.P_PID, process_id, os.WEXITED | os.WNOWAIT)
        at.commit(3)
        at.fill(4, index=1)
        at.say(at.writer_id())
        os.kill(os.getpid(), signal.SIGKILL)

    trainer = Trainer(tmp_path, work, prepare=lambda: separate(NEW_NAMES))
    process_id = hear(trainer)
    assert trainer.wait() == -signal.SIGKILL
    assert wait_for(process_id) == 0
    check_saved(tmp_path, 4)


def test_the_first_process_of_a_container_is_told_that_nothing_outlives_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def work(at: Work) -> None:
        at.close()
        separate(NEW_PROCESSES | NEW_MOUNTS)
        first = os.fork()
        if first == 0:
            assert LIBC.mount(b"proc", b"/proc", b"proc", ctypes.c_ulong(0), None) == 0
            attempt = Attempt(tmp_path)
            writer = start_writer(tmp_path, attempt.number, size_bytes=0, outlives=True, parent=None)
            slot = Slot()
            slot.fill(*described(1, small_state(1)), 1)
            writer.commit(slot)
            writer.close()
            os._exit(0)
        at.say(os.waitpid(first, 0)[1])

    trainer = Trainer(tmp_path, work)
    assert hear(trainer) == 0
    assert trainer.wait() == 0
    check_saved(tmp_path, 1)
    assert "first process of its container" in capfd.readouterr().err


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
