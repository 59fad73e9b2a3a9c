from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from unbroken.errors import RunBusyError, StorageFullError
from unbroken.rundir import layout
from unbroken.rundir.files import read_json, write_json
from unbroken.rundir.lock import RunLock
from unbroken.rundir.processes import identify, identify_self, is_alive


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
        assert is_alive(dataclasses.replace(me, start_ticks=me.start_ticks + 1)) is False
        assert is_alive(dataclasses.replace(me, host="elsewhere", boot_id="another")) is None

    def test_a_host_that_was_renamed_is_the_same_and_a_container_beside_it_is_not(self) -> None:
        me = identify_self()
        if not me.namespace:
            pytest.skip("this kernel tells no namespaces")
        renamed = dataclasses.replace(me, host="before")
        assert is_alive(renamed)
        assert is_alive(dataclasses.replace(renamed, start_ticks=me.start_ticks + 1)) is False
        assert is_alive(dataclasses.replace(renamed, namespace=me.namespace + 1)) is None
        assert is_alive(dataclasses.replace(renamed, namespace=0)) is None

    def test_a_copy_is_not_kept_locked_by_the_holder_of_the_original_and_a_moved_one_is(
        self, tmp_path: Path
    ) -> None:
        original, copy, moved = (tmp_path / name for name in ("original", "copy", "moved"))
        original.mkdir()
        holder = self.start_holder(original)
        try:
            shutil.copytree(original, copy)
            lock = self.lock(copy)
            lock.acquire()
            lock.release()
            original.rename(moved)
            original.mkdir()
            with pytest.raises(RunBusyError, match=f"process {holder.pid}"):
                self.lock(moved).acquire()
        finally:
            holder.communicate()
