"""Nothing of an attempt outlives it, however it tries, and nothing starts beside it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from unbroken.supervisor import cells
from unbroken.supervisor.cells import Cell, find_cell, make_cell
from unbroken.supervisor.cgroups import SUPERVISOR_GROUP, OwnGroups, own_groups

from .conftest import is_running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .conftest import Bench

# A daemon by the book: two forks and a session of its own, deaf to what asks politely.
ESCAPE = """
import os, signal, sys, time
from pathlib import Path
place = Path(os.environ["UNBROKEN_RUN_DIR"])
def escape():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            (place / "escaped").write_text(str(os.getpid()))
            while True:
                time.sleep(1)
        os._exit(0)
    while not (place / "escaped").exists() or not (place / "escaped").read_text():
        time.sleep(0.01)
"""


def test_an_escaped_daemon_is_gone_before_the_next_attempt_starts(bench: Bench) -> None:
    script = bench.script(
        "train.py",
        ESCAPE
        + """
if os.environ["UNBROKEN_ATTEMPT"] == "1":
    escape()
    os.kill(os.getpid(), signal.SIGKILL)
print("there" if Path("/proc", (place / "escaped").read_text()).exists() else "gone")
""",
    )
    done = bench.python(script)
    assert (done.returncode, done.stdout) == (0, "gone\n")
    assert any("left after its leader" in line for line in bench.verdict(1)["evidence"])


def test_what_is_left_at_the_end_is_ended_too(bench: Bench, running: Callable[[int], bool]) -> None:
    done = bench.python(bench.script("train.py", ESCAPE + "escape()\n"))
    assert done.returncode == 0
    assert not running(int((bench.directory / "escaped").read_text()))


def test_stop_now_takes_the_escaped_along(bench: Bench, running: Callable[[int], bool]) -> None:
    script = bench.script("train.py", ESCAPE + "escape()\nprint('ready', flush=True)\ntime.sleep(600)\n")
    viewer = bench.start("run", "--name", "it", "--", sys.executable, script)
    bench.until(lambda: "ready" in bench.output())
    assert bench.cli("stop", "it", "--now").returncode == 0
    assert not running(int((bench.directory / "escaped").read_text()))
    viewer.communicate(timeout=30)
    assert viewer.returncode == 143


def test_workers_that_end_by_themselves_are_not_called_leftovers(bench: Bench) -> None:
    script = bench.script(
        "train.py",
        """
        import os, time
        if os.fork() == 0:
            time.sleep(0.3)
            print("worker done", flush=True)
        """,
    )
    done = bench.python(script)
    assert (done.returncode, done.stdout) == (0, "worker done\n")
    assert not any("left after" in line for line in bench.verdict(1)["evidence"])


def test_a_tree_that_forks_while_it_is_killed_is_emptied(bench: Bench) -> None:
    script = bench.script(
        "train.py",
        """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("forking", flush=True)
        while True:
            if os.fork() == 0:
                os.setsid()
            else:
                # The parent goes, the child goes on: never the same process twice.
                os._exit(0)
            time.sleep(0.005)
        """,
    )
    viewer = bench.start("run", "--name", "it", "--", "sh", "-c", f"{sys.executable} {script}; sleep 600")
    bench.until(lambda: "forking" in bench.output())
    assert bench.cli("stop", "it", "--now").returncode == 0
    viewer.communicate(timeout=30)
    assert bench.state()["state"] == "stopped"


def test_when_the_supervisor_is_killed_the_attempt_goes_on_and_nothing_starts_beside_it(
    bench: Bench, training: str
) -> None:
    viewer = bench.start("run", "--name", "it", "--", sys.executable, training)
    bench.until(lambda: "training" in bench.output())
    state = bench.state()
    leader = state["leader"]["process_id"]
    os.kill(state["supervisor"]["process_id"], signal.SIGKILL)
    _, said = viewer.communicate(timeout=30)
    assert viewer.returncode == 1
    assert "the supervisor was ended by SIGKILL" in said

    assert bench.cli("status", "it").stdout.count("lost") == 1
    stop = bench.cli("stop", "it")
    assert stop.returncode == 1
    assert f"process {leader} still runs" in stop.stderr
    beside = bench.python(training)
    assert beside.returncode == 78
    assert f"process {leader} (attempt 1)" in beside.stderr
    assert bench.attempts() == 1

    os.kill(leader, signal.SIGTERM)
    bench.until(lambda: "saved" in bench.output())
    bench.until(lambda: not is_running(leader))
    assert bench.run("echo", "again").returncode == 0
    assert not list(bench.directory.glob("attempts/*/cell.json"))


@pytest.mark.skipif(os.getuid() != 0, reason="needs the rights to become somebody else")
def test_what_cannot_be_ended_is_named(bench: Bench) -> None:
    script = bench.script(
        "end.py",
        """
        import os
        from pathlib import Path
        from unbroken.rundir.process_tree import ProcessTree, become_subreaper, spawn
        become_subreaper()
        leader = spawn(["sleep", "600"], environment=os.environ, output=Path(os.devnull))
        # Without the rights to signal it, the child is as unkillable as one in state D.
        os.setuid(65534)
        left = ProcessTree(leader).end(term_seconds=0.1, kill_seconds=0.1)
        print(left == [f"process {leader} (sleep, state S)"], left)
        """,
    )
    process = bench.popen([sys.executable, script], stdout=subprocess.PIPE)
    said, _ = process.communicate(timeout=30)
    assert said.startswith("True "), said
    assert bench.strays()
    bench.sweep()


def test_the_next_attempt_starts_when_the_port_of_a_deaf_grandchild_is_free(bench: Bench) -> None:
    script = bench.script(
        "train.py",
        """
        import os, signal, socket, time
        from pathlib import Path
        mark = Path(os.environ["UNBROKEN_RUN_DIR"], "port")
        if os.environ["UNBROKEN_ATTEMPT"] == "1":
            if os.fork() == 0:
                os.setsid()
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                server = socket.create_server(("127.0.0.1", 0))
                mark.with_suffix(".new").write_text(str(server.getsockname()[1]))
                mark.with_suffix(".new").rename(mark)
                time.sleep(600)
            while not mark.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        socket.socket().bind(("127.0.0.1", int(mark.read_text())))
        print("free")
        """,
    )
    done = bench.python(script)
    assert (done.returncode, done.stdout) == (0, "free\n")


def test_training_that_is_stopped_by_job_control_is_reported_and_left_alone(
    bench: Bench, training: str
) -> None:
    viewer = bench.start("run", "--name", "it", "--", sys.executable, training)
    bench.until(lambda: "training" in bench.output())
    leader = bench.state()["leader"]["process_id"]
    os.kill(leader, signal.SIGSTOP)
    bench.until(lambda: "stopped by job control" in bench.state()["reason"])
    assert f"kill -CONT {leader}" in bench.state()["reason"]
    os.kill(leader, signal.SIGCONT)
    bench.until(lambda: bench.state()["reason"] == "")
    assert bench.attempts() == 1
    assert bench.cli("stop", "it").returncode == 0
    viewer.communicate(timeout=30)
    kinds = [
        json.loads(line)["kind"] for line in (bench.directory / "journal.jsonl").read_text().splitlines()
    ]
    assert kinds.count("attempt-stopped-by-job-control") == kinds.count("attempt-continued") == 1


@pytest.fixture(params=["unified", "memory", "freezer"])
def cell(request: pytest.FixtureRequest) -> Iterator[Cell]:
    home = getattr(own_groups(), request.param)
    if home is None:
        pytest.skip(f"no {request.param} hierarchy of control groups here")
    directory = home / f"unbroken.test-{request.param}-{os.getpid()}"
    try:
        directory.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    cell = Cell([directory])
    yield cell
    cell.kill()
    until = time.monotonic() + 10
    while not cell.remove() and time.monotonic() < until:
        time.sleep(0.01)
    assert not directory.exists()


def test_all_that_is_in_a_cell_is_killed_however_it_tries_to_get_away(
    cell: Cell, bench: Bench, running: Callable[[int], bool]
) -> None:
    script = bench.script("train.py", ESCAPE + "escape()\ntime.sleep(600)\n")
    bench.environment["UNBROKEN_RUN_DIR"] = str(bench.place)
    with cell.entered():
        process = bench.popen([sys.executable, script])
    assert str(os.getpid()) not in (cell.directories[0] / "cgroup.procs").read_text().split()
    mark = bench.place / "escaped"
    bench.until(lambda: mark.exists() and mark.read_text())
    assert not cell.is_empty()
    assert not cell.remove()
    cell.kill()
    bench.until(cell.is_empty)
    assert process.wait(timeout=10) == -signal.SIGKILL
    assert not running(int(mark.read_text()))


def test_a_frozen_or_stopped_process_is_killed_too(cell: Cell, bench: Bench) -> None:
    with cell.entered():
        process = bench.popen(["sleep", "600"])
    os.kill(process.pid, signal.SIGSTOP)
    cell.kill()
    bench.until(cell.is_empty)
    assert process.wait(timeout=10) == -signal.SIGKILL


def test_whoever_kills_all_in_a_cell_is_spared_and_not_frozen_there(cell: Cell, bench: Bench) -> None:
    with cell.entered():
        other = bench.popen(["sleep", "600"])
        script = bench.script(
            "kill.py",
            f"""
            from pathlib import Path
            from unbroken.supervisor.cells import Cell
            Cell([Path({str(cell.directories[0])!r})]).kill()
            """,
        )
        killer = bench.popen([sys.executable, script])
    assert killer.wait(timeout=10) == 0
    assert other.wait(timeout=10) == -signal.SIGKILL


def test_empty_cells_are_forgotten_a_day_after_they_were_last_seen_in_use(tmp_path: Path) -> None:
    # What the kernel would make with the directories is made here.
    nobody = 1 << 30
    names = {
        "used": f"1-{nobody}",
        "left": f"2-{nobody}",
        "recent": f"3-{nobody}",
        "kept": f"4-{os.getpid()}",
    }
    places = {what: tmp_path / f"unbroken-{name}" for what, name in names.items()}
    for what, place in places.items():
        (place / "nested").mkdir(parents=True)
        if what != "recent":
            os.utime(place, (0, 0))
    (places["used"] / "cgroup.procs").write_text(f"{os.getppid()}\n")
    cells._forget_the_old(tmp_path)
    assert [what for what, place in places.items() if not place.exists()] == ["left"]
    assert time.time() - places["used"].stat().st_mtime < 600


def test_where_no_group_can_be_made_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = tmp_path / "nowhere"
    monkeypatch.setattr(cells, "own_groups", lambda: OwnGroups(memory=nowhere, freezer=nowhere))
    assert make_cell(tmp_path) is None
    assert find_cell(tmp_path) is None


def test_below_the_unit_that_was_delegated_to_us_memory_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the kernel would make with the directories is made here: its memory is not of version 2.
    unit = tmp_path / "unit.service"
    ours = unit / SUPERVISOR_GROUP
    ours.mkdir(parents=True)
    (unit / "cgroup.subtree_control").write_text("")
    (ours / "cgroup.procs").write_text("")
    monkeypatch.setattr(cells, "own_groups", lambda: OwnGroups(unified=ours))
    made = make_cell(tmp_path)
    assert made is not None
    assert made.directories[0].parent == unit
    assert (unit / "cgroup.subtree_control").read_text() == "+memory"
    with made.entered():
        pass
    assert (ours / "cgroup.procs").read_text() == str(os.getpid())


@pytest.mark.chaos
def test_nothing_starts_beside_a_survivor_that_has_forgotten_where_it_came_from(bench: Bench) -> None:
    script = bench.script(
        "train.py",
        """
        import os, time
        from pathlib import Path
        if os.fork() == 0:
            os.setsid()
            Path("forgetful").write_text(str(os.getpid()))
            os.execve("/bin/sleep", ["sleep", "600"], {})
        time.sleep(600)
        """,
    )
    viewer = bench.start("run", "--name", "it", "--", sys.executable, script)
    mark = bench.place / "forgetful"
    bench.until(lambda: mark.exists() and mark.read_text() and bench.state()["leader"])
    has_cell = find_cell(bench.directory / "attempts/0001") is not None
    state = bench.state()
    for who in ("supervisor", "leader"):
        os.kill(state[who]["process_id"], signal.SIGKILL)
    viewer.communicate(timeout=30)
    forgetful = int(mark.read_text())
    try:
        if not has_cell:
            pytest.skip("needs control groups that can be made")
        beside = bench.run("echo", "again")
        assert beside.returncode == 78
        assert f"process {forgetful} (attempt 1)" in beside.stderr
        # A supervisor that takes over ends what is left of the attempt.
        assert bench.cli("revive", "it").returncode == 0
        bench.until(lambda: not Path("/proc", str(forgetful)).exists())
        assert bench.cli("stop", "it").returncode == 0
    finally:
        with suppress(ProcessLookupError):
            os.kill(forgetful, signal.SIGKILL)
