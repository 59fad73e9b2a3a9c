"""The writer process after the trainer has died: what is left is saved, and nothing of a superseded one."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from unbroken.checkpoint.store import CheckpointStore
from unbroken.errors import StaleWriterError
from unbroken.rundir import layout
from unbroken.rundir.files import write_json
from unbroken.rundir.identity import new_attempt

from .trainers import Trainer, Work, check_saved, ends, names, saved, wait_for, writer_of

pytestmark = pytest.mark.usefixtures("adopting")


def die(*, segfault: bool) -> None:
    if segfault:
        ctypes.string_at(0)
    os.kill(os.getpid(), signal.SIGKILL)


class TestAfterTheDeathOfTheTrainer:
    @pytest.mark.parametrize("segfault", [False, True])
    def test_the_newest_snapshot_becomes_a_checkpoint_and_it_ends(
        self, tmp_path: Path, segfault: bool, capfd: pytest.CaptureFixture[str]
    ) -> None:
        def work(at: Work) -> None:
            at.commit(3)
            at.fill(4, index=1)
            at.fill(5)
            die(segfault=segfault)

        ends(tmp_path, work, -signal.SIGSEGV if segfault else -signal.SIGKILL)
        assert wait_for(writer_of(tmp_path)) == 0
        assert names(tmp_path) == ["step-00000003", "step-00000005"]
        check_saved(tmp_path, 5)
        (event,) = saved(tmp_path)
        assert (event["step"], event["checkpoint"], event["after_end"]) == (5, "step-00000005", True)
        assert os.readlink(tmp_path / "latest") == "checkpoints/step-00000005"
        assert "its last snapshot is saved in step-00000005" in capfd.readouterr().err

    def test_a_process_that_was_just_started_finds_the_snapshot_too(self, tmp_path: Path) -> None:
        def work(at: Work) -> None:
            at.fill(5)
            die(segfault=False)

        ends(tmp_path, work, -signal.SIGKILL)
        assert wait_for(writer_of(tmp_path)) == 0
        check_saved(tmp_path, 5)

    def test_what_was_damaged_as_it_was_written_is_written_again(self, tmp_path: Path) -> None:
        """The trainer, who would have set it aside and asked for that, has died meanwhile."""

        def work(at: Work) -> None:
            name = at.commit(5)
            shard = next((tmp_path / "checkpoints" / name).glob("*.safetensors"))
            shard.write_bytes(shard.read_bytes()[:-1])
            assert at.writer.damage(name, sampled=True)
            die(segfault=False)

        ends(tmp_path, work, -signal.SIGKILL)
        assert wait_for(writer_of(tmp_path)) == 0
        assert names(tmp_path) == ["step-00000005", "step-00000005.1"]
        assert CheckpointStore(tmp_path).is_intact("step-00000005.1")

    @pytest.mark.parametrize("steps", [0, 1])
    def test_with_nothing_left_to_write_it_ends_and_writes_nothing(self, tmp_path: Path, steps: int) -> None:
        def work(at: Work) -> None:
            for step in range(steps):
                at.commit(step)
            die(segfault=False)

        ends(tmp_path, work, -signal.SIGKILL)
        assert wait_for(writer_of(tmp_path)) == 0
        assert len(names(tmp_path)) == steps
        assert saved(tmp_path) == []

    def test_a_forked_child_that_lives_on_does_not_hide_the_death(self, tmp_path: Path) -> None:
        def work(at: Work) -> None:
            at.commit(1)
            at.fill(2, index=1)
            child = os.fork()
            if child == 0:
                signal.pause()
            at.say(child)
            at.hear()

        trainer = Trainer(tmp_path, work)
        child = trainer.hear()
        trainer.kill()
        assert trainer.wait() == -signal.SIGKILL
        assert wait_for(writer_of(tmp_path)) == 0
        check_saved(tmp_path, 2)
        os.kill(child, signal.SIGKILL)
        wait_for(child)

    @pytest.mark.parametrize("has_child", [False, True])
    def test_the_save_in_hand_is_finished_and_told_of(self, tmp_path: Path, has_child: bool) -> None:
        def work(at: Work) -> None:
            at.commit(1)
            os.kill(at.writer_id(), signal.SIGSTOP)
            threading.Thread(target=at.commit, args=(2,), daemon=True).start()
            while not at.writer._is_asking:
                time.sleep(0.001)
            if has_child and (child := os.fork()) == 0:
                signal.pause()
            at.say(child if has_child else None)
            die(segfault=False)

        trainer = Trainer(tmp_path, work)
        child = trainer.hear()
        assert trainer.wait() == -signal.SIGKILL
        os.kill(writer_of(tmp_path), signal.SIGCONT)
        assert wait_for(writer_of(tmp_path)) == 0
        check_saved(tmp_path, 2)
        assert [event["checkpoint"] for event in saved(tmp_path)] == ["step-00000002"]
        assert os.readlink(tmp_path / "latest") == "checkpoints/step-00000002"
        if has_child:
            os.kill(child, signal.SIGKILL)
            wait_for(child)

    def test_the_next_attempt_waits_for_it_and_then_sees_its_checkpoint(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        def first(at: Work) -> None:
            at.commit(1)
            at.fill(2, index=1)
            os.kill(at.writer_id(), signal.SIGSTOP)
            die(segfault=False)

        def second(at: Work) -> None:
            at.say([at.attempt.number, *names(tmp_path)])
            at.close()

        ends(tmp_path, first, -signal.SIGKILL)
        following = Trainer(tmp_path, second)
        said = ""
        while "writes the last checkpoint" not in said:
            said += capfd.readouterr().err
            time.sleep(0.02)
        os.kill(writer_of(tmp_path), signal.SIGCONT)
        assert following.hear() == [2, "step-00000001", "step-00000002"]
        assert following.wait() == 0
        assert wait_for(writer_of(tmp_path)) == 0

    def test_that_of_a_superseded_attempt_commits_nothing(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        def work(at: Work) -> None:
            at.commit(1)
            at.fill(2, index=1)
            new_attempt(tmp_path)
            die(segfault=False)

        ends(tmp_path, work, -signal.SIGKILL)
        assert wait_for(writer_of(tmp_path)) == StaleWriterError.exit_code
        assert names(tmp_path) == ["step-00000001"]
        assert os.listdir(tmp_path / "checkpoints") == ["step-00000001"]
        assert "superseded by attempt 2" in capfd.readouterr().err

    @pytest.mark.parametrize("wakes_up", [False, True])
    def test_a_trainer_that_slept_while_another_host_took_over_writes_no_more(
        self, tmp_path: Path, wakes_up: bool
    ) -> None:
        def work(at: Work) -> None:
            at.commit(1)
            at.fill(2, index=1)
            at.say("asleep")
            os.kill(os.getpid(), signal.SIGSTOP)
            with pytest.raises(StaleWriterError):
                at.writer.commit(at.slots[1])
            die(segfault=False)

        trainer = Trainer(tmp_path, work)
        assert trainer.hear() == "asleep"
        os.waitid(os.P_PID, trainer.process_id, os.WSTOPPED | os.WNOWAIT)
        elsewhere = {"host": "elsewhere", "process_id": 1, "start_ticks": 1, "boot_id": ""}
        write_json(tmp_path / layout.WRITER_FILE, elsewhere)
        trainer.kill(signal.SIGCONT if wakes_up else signal.SIGKILL)
        assert trainer.wait() == -signal.SIGKILL
        assert wait_for(writer_of(tmp_path)) == StaleWriterError.exit_code
        assert names(tmp_path) == ["step-00000001"]
