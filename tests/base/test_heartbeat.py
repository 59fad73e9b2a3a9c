from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from unbroken.rundir.heartbeat import Heartbeat, read_heartbeat


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
