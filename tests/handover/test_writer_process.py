"""The writer process: what it does for a trainer that lives, and what it says when it cannot."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unbroken import errors
from unbroken.checkpoint.store import CheckpointStore
from unbroken.errors import StaleWriterError, StorageDeniedError, StorageError, UnbrokenError
from unbroken.handover import process
from unbroken.handover.messages import Reply, failure_of, raised
from unbroken.handover.process import IGNORED_SIGNALS
from unbroken.rundir.identity import new_attempt

from ..checkpoint.states import state_at
from .trainers import Work, check_saved, ends, names, wait_for, writer_of

pytestmark = pytest.mark.usefixtures("adopting")


class TestServing:
    def test_what_is_committed_is_the_state_and_can_be_verified(self, tmp_path: Path) -> None:
        def work(at: Work) -> None:
            committed = at.writer.commit(at.fill(7, state=state_at(7)))
            assert (committed.name, committed.step) == ("step-00000007", 7)
            assert at.writer.is_intact(committed.name)
            shard = next((tmp_path / "checkpoints/step-00000007").glob("*.safetensors"))
            data = bytearray(shard.read_bytes())
            data[-1] ^= 1
            shard.write_bytes(data)
            assert not at.writer.is_intact(committed.name)
            assert at.commit(8, index=1) == "step-00000008"
            at.close()

        ends(tmp_path, work)
        store = CheckpointStore(tmp_path)
        assert store.names() == ["step-00000007", "step-00000008"]
        assert not store.is_intact("step-00000007")
        check_saved(tmp_path, 8)

    def test_what_was_damaged_on_the_disk_is_told_and_shared_with_nothing(self, tmp_path: Path) -> None:
        def work(at: Work) -> None:
            for step, sampled in ((1, False), (2, True)):
                name = at.writer.commit(at.fill(step, state={**state_at(9), "n": {"step": step}})).name
                assert at.writer.damage(name, sampled=sampled) == ""
                # Of so few tensors a sample has nearly all, of this shard at any rate the large one.
                shard = next((tmp_path / "checkpoints" / name).glob("model*"))
                data = bytearray(shard.read_bytes())
                data[5000] ^= 1
                shard.unlink()
                shard.write_bytes(data)
                assert "model/weight" in at.writer.damage(name, sampled=sampled)
            at.writer.commit(at.fill(3, state=state_at(9)))
            at.close()

        ends(tmp_path, work)
        assert CheckpointStore(tmp_path).is_intact("step-00000003")

    def test_an_orderly_end_leaves_no_process_and_commits_nothing_more(self, tmp_path: Path) -> None:
        def work(at: Work) -> None:
            at.commit(1)
            at.fill(2, index=1)
            process_id = at.writer_id()
            at.close()
            assert not os.path.exists(f"/proc/{process_id}")

        ends(tmp_path, work)
        assert names(tmp_path) == ["step-00000001"]

    def test_signals_that_ask_to_end_do_not_end_it_not_even_while_it_starts(self, tmp_path: Path) -> None:
        def work(at: Work) -> None:
            for number in IGNORED_SIGNALS:
                os.kill(at.writer_id(), number)
            at.commit(1)
            for number in IGNORED_SIGNALS:
                os.kill(at.writer_id(), number)
            at.commit(2)
            os.killpg(at.writer_id(), signal.SIGTERM)
            process_id = at.writer_id()
            at.commit(3)
            assert at.writer_id() == process_id
            assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
            at.close()

        ends(tmp_path, work)
        assert len(names(tmp_path)) == 3

    def test_a_parent_that_was_deleted_is_no_obstacle(self, tmp_path: Path) -> None:
        """An unchanged shard is shared with the checkpoint before, which somebody may remove by hand."""

        def work(at: Work) -> None:
            for step in (1, 2, 3):
                at.writer.commit(at.fill(step, state={**state_at(9), "n": {"step": step}}))
                CheckpointStore(tmp_path).storage.delete(f"checkpoints/step-{step:08d}")
            at.writer.commit(at.fill(4, state=state_at(9)))
            at.writer.commit(at.fill(5, state=state_at(9)))
            at.close()

        ends(tmp_path, work)
        store = CheckpointStore(tmp_path)
        assert [store.is_intact(name) for name in store.names()] == [True, True]
        large = [next(tmp_path.glob(f"checkpoints/step-0000000{step}/model*")) for step in (4, 5)]
        assert os.path.samefile(*large)

    @pytest.mark.chaos
    def test_what_it_uses_does_not_grow(self, quick_disk: Path) -> None:
        def work(at: Work) -> None:
            seen = []
            for step in range(1, 301):
                at.commit(step, index=step % 2)
                if step in (100, 300):
                    seen.append([used_by(at.writer_id()), used_by(os.getpid())])
            for before, after in zip(*seen, strict=True):
                assert before["descriptors"] == after["descriptors"]
                # One that has just ended may still be counted.
                assert after["threads"] <= before["threads"] + 1
                assert after["memory"] < before["memory"] + (2 << 20)
            at.close()

        ends(quick_disk, work)
        assert len(names(quick_disk)) == 300


def used_by(process_id: int) -> dict[str, int]:
    status = Path(f"/proc/{process_id}/status").read_text()
    words = dict(line.split(":", 1) for line in status.splitlines())
    return {
        "descriptors": len(os.listdir(f"/proc/{process_id}/fd")),
        "threads": int(words["Threads"]),
        "memory": int(words["RssAnon"].split()[0]) << 10,
    }


class TestErrors:
    @pytest.mark.parametrize(
        "kind",
        [
            found
            for found in vars(errors).values()
            if isinstance(found, type) and issubclass(found, UnbrokenError)
        ],
        ids=lambda kind: kind.__name__,
    )
    def test_an_error_is_sent_with_class_message_and_hint(self, kind: type[UnbrokenError]) -> None:
        reply = Reply(number=3, failure=failure_of(kind("dies \u00fcber\n1", hint="try ä")))
        failure = process.msgspec.json.decode(process.msgspec.json.encode(reply), type=Reply).failure
        assert failure is not None
        error = raised(failure)
        assert (type(error), error.message, error.hint) == (kind, "dies über\n1", "try ä")
        assert error.__notes__ == ["hint: try ä"]

    def test_the_longest_error_fits_into_a_message(self) -> None:
        error = StorageError("\0" * 10_000, hint="\U0001f600" * 10_000)
        assert len(process.msgspec.json.encode(Reply(failure=failure_of(error)))) < process.MAX_MESSAGE_BYTES

    def test_an_error_of_the_process_is_raised_here(self, tmp_path: Path) -> None:
        def work(at: Work) -> None:
            (tmp_path / "checkpoints").write_text("not a directory")
            with pytest.raises(StorageDeniedError, match="checkpoints") as caught:
                at.commit(1)
            assert "check the owner" in caught.value.hint
            (tmp_path / "checkpoints").unlink()
            at.commit(2)
            new_attempt(tmp_path)
            with pytest.raises(StaleWriterError, match="superseded"):
                at.commit(3)
            at.close()

        ends(tmp_path, work)
        check_saved(tmp_path, 2)

    def test_a_process_that_is_killed_fails_the_save_in_hand_and_the_next_has_another(
        self, tmp_path: Path
    ) -> None:
        def work(at: Work) -> None:
            at.commit(1)
            old = at.writer_id()
            with pytest.raises(StorageError, match=r"ended by signal 9") as caught:
                kill_while_it_commits(at, 2)
            assert (type(caught.value), str(tmp_path) in caught.value.message) == (StorageError, True)
            assert "out-of-memory" in caught.value.hint
            assert not os.path.exists(f"/proc/{old}"), "a zombie is left"
            at.commit(3, index=1)
            assert at.writer_id() == writer_of(tmp_path) != old
            at.close()

        ends(tmp_path, work)
        assert names(tmp_path) == ["step-00000001", "step-00000003"]
        check_saved(tmp_path, 3)

    def test_one_that_is_killed_while_idle_is_replaced_as_the_next_slot_is_shared(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        def work(at: Work) -> None:
            at.commit(1)
            old = at.writer_id()
            os.kill(old, signal.SIGKILL)
            os.waitid(os.P_PID, old, os.WEXITED | os.WNOWAIT)
            at.fill(2)
            assert at.writer_id() != old
            os.kill(os.getpid(), signal.SIGKILL)

        ends(tmp_path, work, -signal.SIGKILL)
        assert wait_for(writer_of(tmp_path)) == 0
        check_saved(tmp_path, 2)
        assert "ended by signal 9; another takes its place" in capfd.readouterr().err

    def test_an_answer_that_nobody_waited_for_is_not_taken_for_the_next(self, tmp_path: Path) -> None:
        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        def work(at: Work) -> None:
            at.commit(1)
            signal.signal(signal.SIGALRM, interrupt)
            os.kill(at.writer_id(), signal.SIGSTOP)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt):
                at.commit(2)
            os.kill(at.writer_id(), signal.SIGCONT)
            assert at.commit(3, index=1) == "step-00000003"
            assert at.writer.is_intact("step-00000003")
            at.close()

        ends(tmp_path, work)

    @pytest.mark.chaos
    def test_slots_shared_by_one_thread_while_another_commits_are_not_mixed_up(self, tmp_path: Path) -> None:
        def work(at: Work) -> None:
            at.commit(1)
            for step in range(2, 8):
                at.fill(step)
                sharing = threading.Thread(target=share_again_and_again, args=(at, done := threading.Event()))
                killing = threading.Timer(0.01 * (step % 4), os.kill, (at.writer_id(), signal.SIGKILL))
                sharing.start()
                killing.start()
                outcomes = [outcome_of(lambda: at.writer.commit(at.slots[0]).step) for _ in range(3)]
                assert all(outcome == step or "signal 9" in str(outcome) for outcome in outcomes)
                assert outcomes.count(step) >= 2
                killing.join()
                done.set()
                sharing.join()
            at.close()

        ends(tmp_path, work)


def outcome_of(act: Callable[[], int]) -> int | StorageError:
    try:
        return act()
    except StorageError as error:
        return error


def kill_while_it_commits(at: Work, step: int) -> None:
    os.kill(at.writer_id(), signal.SIGSTOP)
    killing = threading.Timer(0.05, os.kill, (at.writer_id(), signal.SIGKILL))
    killing.start()
    try:
        at.commit(step)
    finally:
        killing.join()


def share_again_and_again(at: Work, done: threading.Event) -> None:
    while not done.is_set():
        at.writer.share(at.slots[1])
