from __future__ import annotations

import os
import subprocess
from pathlib import Path

from unbroken.rundir.processes import identify, read_stat


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
