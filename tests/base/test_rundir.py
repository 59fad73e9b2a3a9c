from __future__ import annotations

import math
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from unbroken.errors import (
    FormatVersionError,
    NotARunError,
    RunBusyError,
    StorageDeniedError,
    StorageError,
    StorageFullError,
    UsageError,
)
from unbroken.rundir import control, identity, layout
from unbroken.rundir.files import create_json, read_json, sweep_temporary, write_json
from unbroken.rundir.heartbeat import Heartbeat, read_heartbeat
from unbroken.rundir.journal import Journal, number, read_events
from unbroken.rundir.last_words import LastWords, read_last_words, write_last_words
from unbroken.rundir.lock import RunLock
from unbroken.rundir.processes import identify, identify_self, is_alive, read_stat


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own with no byte left, but room for names."""
    place = tmp_path / "full disk"
    place.mkdir()
    if os.geteuid() != 0:
        pytest.skip("a full disk is mounted for this test, and only root may mount")
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"a full disk cannot be mounted here: {done.stderr.strip()}")
    try:
        with pytest.raises(OSError), (place / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(b"x" * 4096)
        yield place
    finally:
        # Lazily: what a failed test still has open must not keep the mount.
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@contextmanager
def file_size_limited(size_bytes: int) -> Iterator[None]:
    """Beyond that size this process writes no file: the kernel cuts writes short there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class TestLayout:
    @pytest.mark.parametrize("order", [(0, 0), (1200, 0), (1200, 3), (99_999_999, 0), (123_456_789, 1)])
    def test_checkpoint_names_are_read_back(self, order: tuple[int, int]) -> None:
        assert layout.parse_checkpoint_name(layout.checkpoint_name(*order)) == order

    @pytest.mark.parametrize(
        "name",
        ["step_final", "step-12", "step-00000012.0", "step-000000012", "step-00000012-x", ".staging-x"],
    )
    def test_other_names_are_no_checkpoints(self, name: str) -> None:
        assert layout.parse_checkpoint_name(name) is None


class TestJournal:
    def test_events_are_read_back_in_order_with_their_fields(self, tmp_path: Path) -> None:
        with Journal(tmp_path / "j") as journal:
            journal.append("step", step=1, loss=0.1)
            journal.append("saved", checkpoint="step-00000001")
        kinds = [(event["kind"], event.get("loss")) for event in read_events(tmp_path / "j")]
        assert kinds == [("step", 0.1), ("saved", None)]

    def test_floats_keep_every_bit_and_what_json_lacks_is_kept_as_words(self, tmp_path: Path) -> None:
        values = [0.1 + 0.2, 5e-324, -0.0, math.nan, math.inf, -math.inf]
        with Journal(tmp_path / "j") as journal:
            for value in values:
                journal.append("step", loss=value)
        found = [number(event["loss"]) for event in read_events(tmp_path / "j")]
        assert [value.hex() for value in found if value is not None] == [value.hex() for value in values]

    def test_a_torn_last_line_is_no_event_and_does_not_spoil_the_next(self, tmp_path: Path) -> None:
        path = tmp_path / "j"
        with Journal(path) as journal:
            journal.append("step", step=1)
        with path.open("ab") as file:
            file.write(b'{"time":1,"kind":"st')
        with Journal(path) as journal:
            journal.append("step", step=2)
        assert [event["step"] for event in read_events(path)] == [1, 2]

    @pytest.mark.parametrize("cut", range(1, 40))
    def test_a_file_cut_anywhere_gives_the_whole_events_before_the_cut(
        self, tmp_path: Path, cut: int
    ) -> None:
        path = tmp_path / "j"
        with Journal(path) as journal:
            journal.append("step", step=1)
            journal.append("step", step=2)
        path.write_bytes(path.read_bytes()[:-cut])
        steps = [event["step"] for event in read_events(path)]
        assert steps == [1, 2][: len(steps)]
        assert len(steps) >= 1 or cut > len(path.read_bytes())

    def test_events_of_two_writers_never_mix_in_a_line(self, tmp_path: Path) -> None:
        path = tmp_path / "j"

        def write(writer: int) -> None:
            with Journal(path) as journal:
                for step in range(300):
                    journal.append("step", writer=writer, step=step, filler="x" * 200)

        threads = [threading.Thread(target=write, args=(writer,)) for writer in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(list(read_events(path))) == 900

    def test_an_event_after_a_line_that_the_disk_cut_short_is_not_lost_with_it(self, tmp_path: Path) -> None:
        path = tmp_path / "j"
        with Journal(path) as journal:
            journal.append("step", step=1)
            with file_size_limited(path.stat().st_size + 10):
                for _ in range(2):
                    with pytest.raises(StorageError, match="append to"):
                        journal.append("step", step=2)
            journal.append("step", step=3)
            journal.append("step", step=4)
        assert [event["step"] for event in read_events(path)] == [1, 3, 4]

    def test_a_write_that_takes_only_a_part_is_finished(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write = os.write
        with Journal(tmp_path / "j") as journal:
            monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
            journal.append("step", step=1)
            journal.append("step", step=2)
            monkeypatch.undo()
        assert [event["step"] for event in read_events(tmp_path / "j")] == [1, 2]

    def test_a_full_disk_and_a_failed_sync_are_errors_of_ours_that_name_the_journal(self) -> None:
        # A device that takes no byte, and knows no sync.
        with Journal(Path("/dev/full")) as journal:
            with pytest.raises(StorageFullError, match="append to /dev/full: No space left") as full:
                journal.append("step", step=1)
            assert "free space" in full.value.hint
            with pytest.raises(StorageError, match="sync /dev/full"):
                journal.sync()

    def test_a_journal_that_is_not_there_has_no_events(self, tmp_path: Path) -> None:
        assert list(read_events(tmp_path / "absent")) == []

    def test_a_journal_in_an_impossible_place_is_an_error_that_names_it(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(StorageError, match="file"):
            Journal(tmp_path / "file" / "j")


class TestHeartbeat:
    def test_the_last_beat_is_read_back_also_after_its_writer_closed_it(self, tmp_path: Path) -> None:
        heart = Heartbeat(tmp_path / "h")
        heart.beat(phase="starting", step=0, checkpoint_step=-1)
        heart.beat(phase="training", step=7, checkpoint_step=5)
        heart.close()
        beat = read_heartbeat(tmp_path / "h")
        assert beat is not None
        found = (beat.phase, beat.step, beat.checkpoint_step, beat.beats, beat.process_id)
        assert found == ("training", 7, 5, 2, os.getpid())

    def test_no_file_an_empty_file_or_a_foreign_file_is_no_beat(self, tmp_path: Path) -> None:
        assert read_heartbeat(tmp_path / "h") is None
        (tmp_path / "h").write_bytes(b"")
        assert read_heartbeat(tmp_path / "h") is None
        (tmp_path / "h").write_bytes(b"something else entirely" * 100)
        assert read_heartbeat(tmp_path / "h") is None

    def test_a_beat_that_its_writer_died_in_is_no_reading(self, tmp_path: Path) -> None:
        heart = Heartbeat(tmp_path / "h")
        heart.beat(phase="training", step=1, checkpoint_step=-1)
        heart.close()
        data = bytearray((tmp_path / "h").read_bytes())
        data[16] |= 1
        (tmp_path / "h").write_bytes(data)
        assert read_heartbeat(tmp_path / "h") is None

    def test_the_first_beat_on_a_full_disk_is_an_error_and_no_death_by_a_signal(
        self, full_disk: Path
    ) -> None:
        # In a process of its own: a beat into a hole that cannot be filled is a SIGBUS.
        code = (
            "import sys; from pathlib import Path; from unbroken.errors import StorageFullError\n"
            "from unbroken.rundir.heartbeat import Heartbeat\n"
            "try: Heartbeat(Path(sys.argv[1])).beat(phase='x', step=0, checkpoint_step=-1)\n"
            "except StorageFullError as error: print(error)"
        )
        command = [sys.executable, "-c", code, str(full_disk / "h")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"open {full_disk / 'h'}: No space left")
        assert read_heartbeat(full_disk / "h") is None

    def test_a_heartbeat_is_opened_again_by_a_later_writer(self, tmp_path: Path) -> None:
        for step in (1, 2):
            heart = Heartbeat(tmp_path / "h")
            heart.beat(phase="training", step=step, checkpoint_step=-1)
            heart.close()
        beat = read_heartbeat(tmp_path / "h")
        assert beat is not None
        assert beat.step == 2


class TestLock:
    def lock(self, directory: Path) -> RunLock:
        return RunLock(directory / layout.WRITER_LOCK, directory / layout.WRITER_FILE)

    def start_holder(self, directory: Path) -> subprocess.Popen[str]:
        code = (
            "import sys; from pathlib import Path; from unbroken.rundir.lock import RunLock\n"
            "d = Path(sys.argv[1]); lock = RunLock(d / 'writer.lock', d / 'writer.json'); lock.acquire()\n"
            "print('held', flush=True); sys.stdin.read()"
        )
        holder = subprocess.Popen(
            [sys.executable, "-c", code, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        return holder

    def test_a_second_writer_is_refused_and_told_who_where_and_since_when(self, tmp_path: Path) -> None:
        holder = self.start_holder(tmp_path)
        try:
            with pytest.raises(RunBusyError, match=rf"process {holder.pid} on \S+ since 20\d\d-"):
                self.lock(tmp_path).acquire()
        finally:
            holder.communicate()

    def test_a_killed_holder_leaves_the_lock_free(self, tmp_path: Path) -> None:
        holder = self.start_holder(tmp_path)
        holder.kill()
        holder.communicate()
        lock = self.lock(tmp_path)
        lock.acquire()
        found = lock.holder()
        assert found is not None
        assert found[0] == identify_self()
        lock.release()

    def test_a_forked_child_that_outlives_its_parent_does_not_keep_the_lock(self, tmp_path: Path) -> None:
        code = (
            "import os, sys; from pathlib import Path; from unbroken.rundir.lock import RunLock\n"
            "d = Path(sys.argv[1]); lock = RunLock(d / 'writer.lock', d / 'writer.json'); lock.acquire()\n"
            "if os.fork(): os._exit(0)\n"
            "print('orphan', flush=True); sys.stdin.read()"
        )
        parent = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert parent.stdout is not None
        assert parent.stdout.readline() == "orphan\n"
        parent.wait()
        lock = self.lock(tmp_path)
        lock.acquire()
        lock.release()
        parent.communicate()

    @pytest.mark.parametrize("spelling", ["run", "link", "run/../run"])
    def test_a_second_lock_in_the_same_process_is_refused_and_told_that_it_is_this_process(
        self, tmp_path: Path, spelling: str
    ) -> None:
        (tmp_path / "run").mkdir()
        (tmp_path / "link").symlink_to("run")
        lock, second = self.lock(tmp_path / "run"), self.lock(tmp_path / spelling)
        lock.acquire()
        for _ in range(2):
            with pytest.raises(RunBusyError, match=rf"process {os.getpid()}, this one, writes to this run"):
                second.acquire()
        second.release()
        # The refused one has not opened the file either, for closing it would have freed the lock.
        assert self.is_refused_elsewhere(tmp_path / "run")
        lock.release()
        second.acquire()
        second.release()

    def test_a_lock_that_could_not_be_taken_is_not_remembered_as_held(
        self, tmp_path: Path, full_disk: Path
    ) -> None:
        (full_disk / layout.WRITER_LOCK).touch()
        with pytest.raises(StorageFullError):
            self.lock(full_disk).acquire()
        (full_disk / "filler").unlink()
        lock = self.lock(full_disk)
        lock.acquire()
        lock.release()
        holder = self.start_holder(tmp_path)
        with pytest.raises(RunBusyError, match=f"process {holder.pid} on"):
            self.lock(tmp_path).acquire()
        holder.communicate()
        lock = self.lock(tmp_path)
        lock.acquire()
        lock.release()

    def test_a_forked_child_that_releases_leaves_the_lock_and_its_holder_to_the_parent(
        self, tmp_path: Path
    ) -> None:
        lock = self.lock(tmp_path)
        lock.acquire()
        self.in_forked_child(lock.release)
        found = lock.holder()
        assert found is not None
        assert found[0] == identify_self()
        assert self.is_refused_elsewhere(tmp_path)
        with pytest.raises(RunBusyError):
            self.lock(tmp_path).acquire()
        lock.release()

    def test_a_forked_child_is_refused_as_long_as_its_parent_holds_the_lock(self, tmp_path: Path) -> None:
        lock, parent = self.lock(tmp_path), os.getpid()
        lock.acquire()

        def is_refused() -> None:
            with pytest.raises(RunBusyError, match=f"process {parent} on"):
                lock.acquire()

        self.in_forked_child(is_refused)
        lock.release()

    def test_a_forked_child_can_take_the_lock_that_its_dead_parent_held(self, tmp_path: Path) -> None:
        code = (
            "import os, sys, time; from pathlib import Path; from unbroken.rundir.lock import RunLock\n"
            "d = Path(sys.argv[1]); lock = RunLock(d / 'writer.lock', d / 'writer.json'); lock.acquire()\n"
            "parent = os.getpid()\n"
            "if os.fork(): os._exit(0)\n"
            "while os.getppid() == parent: time.sleep(0.01)\n"
            "lock.acquire(); print(lock.holder()[0].process_id == os.getpid())"
        )
        command = [sys.executable, "-c", code, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.stdout, done.stderr) == ("True\n", "")

    def is_refused_elsewhere(self, directory: Path) -> bool:
        def is_refused() -> None:
            # By the kernel, whatever the holder file says.
            (directory / layout.WRITER_FILE).unlink(missing_ok=True)
            with pytest.raises(RunBusyError):
                self.lock(directory).acquire()

        words = read_json(directory / layout.WRITER_FILE)
        self.in_forked_child(is_refused)
        assert words is not None
        write_json(directory / layout.WRITER_FILE, words)
        return True

    def in_forked_child(self, act: Callable[[], None]) -> None:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                act()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0

    def test_a_living_holder_counts_even_where_the_file_system_has_no_locks(self, tmp_path: Path) -> None:
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
            found = identify(other.pid)
            assert found is not None
            write_json(tmp_path / layout.WRITER_FILE, {**found.to_json(), "since": 0})
            with pytest.raises(RunBusyError, match=f"process {other.pid}"):
                self.lock(tmp_path).acquire()
            other.communicate(b"\n")
        lock = self.lock(tmp_path)
        lock.acquire()
        lock.release()

    def test_a_process_that_is_gone_is_not_alive_and_one_of_another_host_cannot_be_asked(self) -> None:
        me = identify_self()
        assert is_alive(me)
        import dataclasses

        assert is_alive(dataclasses.replace(me, start_ticks=me.start_ticks + 1)) is False
        assert is_alive(dataclasses.replace(me, host="elsewhere")) is None


class TestProcesses:
    def test_the_name_of_a_process_may_hold_brackets_and_blanks(self, tmp_path: Path) -> None:
        program = tmp_path / "a) S (b"
        program.symlink_to("/bin/sleep")
        with subprocess.Popen([program, "60"]) as process:
            found = read_stat(process.pid)
            process.kill()
        assert found is not None
        assert (found.process_id, found.parent_id, found.name) == (process.pid, os.getpid(), "a) S (b")
        assert read_stat(process.pid) is None

    def test_a_zombie_can_be_read_but_is_nobody_any_more(self) -> None:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        found = read_stat(child)
        assert found is not None
        assert found.state == "Z"
        assert identify(child) is None
        os.waitpid(child, 0)


class TestIdentity:
    def test_a_new_directory_becomes_a_run_and_keeps_its_identity(self, tmp_path: Path) -> None:
        first = identity.open_run(tmp_path / "a" / "digits")
        assert first.name == "digits"
        assert identity.open_run(tmp_path / "a" / "digits") == first

    def test_two_that_race_for_a_new_run_get_the_same_identity(self, tmp_path: Path) -> None:
        found: list[identity.RunIdentity] = []
        threads = [
            threading.Thread(target=lambda: found.append(identity.open_run(tmp_path / "r"))) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 8
        assert len({run.run_id for run in found}) == 1

    def test_a_run_file_of_another_program_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "run.json").write_text('{"format": "something"}')
        with pytest.raises(NotARunError, match="expected format 'unbroken-run', found 'something'"):
            identity.open_run(tmp_path)

    @pytest.mark.parametrize(
        "content", ["", "{", "[]", "nonsense", '{"format": "unbroken-run", "format_version": 1}']
    )
    def test_a_damaged_run_file_is_refused_and_left_as_it_is(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "run.json").write_text(content)
        with pytest.raises(NotARunError, match=r"run\.json"):
            identity.open_run(tmp_path)
        assert (tmp_path / "run.json").read_text() == content

    def test_a_newer_format_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "run.json").write_text('{"format": "unbroken-run", "format_version": 99}')
        with pytest.raises(FormatVersionError, match="found 99"):
            identity.open_run(tmp_path)

    def test_checkpoints_without_a_run_file_are_not_taken_over(self, tmp_path: Path) -> None:
        (tmp_path / "checkpoints").mkdir()
        with pytest.raises(NotARunError, match=r"expected run\.json beside checkpoints"):
            identity.open_run(tmp_path)
        assert os.listdir(tmp_path) == ["checkpoints"]

    def test_attempts_are_numbered_without_gaps_and_never_twice(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv(layout.ATTEMPT_VARIABLE, raising=False)
        assert [identity.claim_attempt(tmp_path) for _ in range(3)] == [1, 2, 3]
        assert layout.attempts(tmp_path) == [1, 2, 3]
        monkeypatch.setenv(layout.ATTEMPT_VARIABLE, "2")
        assert identity.claim_attempt(tmp_path) == 2

    @pytest.mark.parametrize("given", ["7", "x", "-1", ""])
    def test_an_attempt_that_was_not_made_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
    ) -> None:
        monkeypatch.setenv(layout.ATTEMPT_VARIABLE, given)
        with pytest.raises(UsageError, match="expected the number of an attempt"):
            identity.claim_attempt(tmp_path)


class TestFiles:
    def test_a_value_is_replaced_whole_and_leaves_nothing_beside_it(self, tmp_path: Path) -> None:
        write_json(tmp_path / "f", {"a": 1})
        write_json(tmp_path / "f", {"b": 2})
        assert read_json(tmp_path / "f") == {"b": 2}
        assert os.listdir(tmp_path) == ["f"]

    def test_only_the_first_creates(self, tmp_path: Path) -> None:
        assert create_json(tmp_path / "f", {"a": 1})
        assert not create_json(tmp_path / "f", {"b": 2})
        assert read_json(tmp_path / "f") == {"a": 1}
        assert os.listdir(tmp_path) == ["f"]

    def test_what_a_dead_writer_left_is_swept_and_what_a_living_one_writes_is_not(
        self, tmp_path: Path
    ) -> None:
        with subprocess.Popen([sys.executable, "-c", ""]) as dead:
            dead.wait()
        (tmp_path / f".unbroken-tmp-{dead.pid}-00").write_text("{")
        (tmp_path / f".unbroken-tmp-{os.getpid()}-00").write_text("{")
        (tmp_path / "mine").write_text("x")
        assert sweep_temporary(tmp_path) == [f".unbroken-tmp-{dead.pid}-00"]
        assert sorted(os.listdir(tmp_path)) == [f".unbroken-tmp-{os.getpid()}-00", "mine"]

    def test_a_file_where_a_directory_should_be_is_denied_with_its_path(self, tmp_path: Path) -> None:
        (tmp_path / "f").write_text("")
        with pytest.raises(StorageDeniedError, match="f"):
            write_json(tmp_path / "f" / "g", {})

    def test_a_full_disk_is_an_error_of_its_own_and_leaves_the_old_value(self, full_disk: Path) -> None:
        (full_disk / "filler").unlink()
        write_json(full_disk / "f", {"a": 1})
        with pytest.raises(StorageFullError, match="No space left") as full:
            write_json(full_disk / "f", {"b": "x" * 65536})
        assert "free space" in full.value.hint
        assert read_json(full_disk / "f") == {"a": 1}
        assert os.listdir(full_disk) == ["f"]


class TestRequestsAndLastWords:
    def test_a_stop_request_is_seen_until_it_is_withdrawn(self, tmp_path: Path) -> None:
        assert control.read_stop(tmp_path) is None
        control.request_stop(tmp_path, reason="maintenance", deadline_seconds=5.0)
        found = control.read_stop(tmp_path)
        assert found == control.StopRequest(reason="maintenance", deadline_seconds=5.0)
        control.clear_stop(tmp_path)
        assert control.read_stop(tmp_path) is None

    def test_a_stop_request_that_cannot_be_read_still_stops(self, tmp_path: Path) -> None:
        (tmp_path / "control").mkdir()
        (tmp_path / layout.STOP_FILE).write_text("{")
        assert control.read_stop(tmp_path) is not None

    def test_a_save_request_is_taken_once(self, tmp_path: Path) -> None:
        control.request_save(tmp_path)
        assert [control.take_save_request(tmp_path) for _ in range(2)] == [True, False]

    def test_last_words_are_read_back(self, tmp_path: Path) -> None:
        words = LastWords(ending="stopped", step=7, checkpoint="step-00000007", reason="signal SIGTERM")
        write_last_words(tmp_path, words)
        assert read_last_words(tmp_path) == words

    @pytest.mark.parametrize("content", ["", "{", '{"ending": "exploded"}', '{"ending": "stopped"}', "[1]"])
    def test_words_that_cannot_be_understood_are_none(self, tmp_path: Path, content: str) -> None:
        (tmp_path / layout.LAST_WORDS).write_text(content)
        assert read_last_words(tmp_path) is None
