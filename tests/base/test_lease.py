"""Who holds a run where locks do not work, or do not reach: a lease tells, watched by one's own clock."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unbroken.errors import RunBusyError
from unbroken.rundir import lock as lock_module
from unbroken.rundir.files import write_json
from unbroken.rundir.lease import Lease, is_changed, read_lease
from unbroken.rundir.lock import RunLock, judge
from unbroken.rundir.processes import ProcessIdentity, identify_self

# Long enough to be renewed on a busy machine; and such that a test that waited for it would be noticed.
LONG = 30.0
# Waited for to its end, where nobody renews.
SHORT = 0.4

HOLDER = """
import errno, fcntl, os, sys, types
from pathlib import Path
from unbroken.rundir import processes
from unbroken.rundir.lock import RunLock

directory, seconds, refusal, host = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4]
def refuse(*arguments):
    raise OSError(getattr(errno, refusal), os.strerror(getattr(errno, refusal)))
if refusal:
    fcntl.lockf = refuse
if host:
    os.uname = lambda: types.SimpleNamespace(nodename=host)
    processes.boot_id = lambda: "boot of " + host
lock = RunLock(directory / "writer.lock", directory / "writer.json", lease_seconds=seconds)
try:
    lock.acquire()
except Exception as error:
    print(type(error).__name__, flush=True)
else:
    print("held", flush=True)
for line in sys.stdin:
    if line == "ours?\\n":
        print(lock.is_still_ours(), flush=True)
    if line == "release\\n":
        lock.release()
        print("released", flush=True)
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start processes that try to hold the run, and end them with the test."""
    running: list[subprocess.Popen[str]] = []

    def start_one(seconds: float = LONG, refusal: str = "", host: str = "") -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDER, str(tmp_path), str(seconds), refusal, host]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        running.append(process)
        return process

    yield start_one
    for process in running:
        process.kill()
        process.communicate()


def answer(process: subprocess.Popen[str], question: str = "") -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    if question:
        process.stdin.write(question + "\n")
        process.stdin.flush()
    return process.stdout.readline().strip()


def ours(directory: Path, seconds: float = LONG) -> RunLock:
    return RunLock(directory / "writer.lock", directory / "writer.json", lease_seconds=seconds)


def refuse_locks(monkeypatch: pytest.MonkeyPatch, number: int = errno.ENOLCK) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", refuse)


def test_a_lease_is_changed_as_long_as_the_lock_is_held_and_gone_afterwards(tmp_path: Path) -> None:
    lock = ours(tmp_path, seconds=0.5)
    started = time.monotonic()
    lock.acquire()
    path = tmp_path / "writer.lease"
    assert is_changed(lambda: read_lease(path), read_lease(path), LONG)
    assert lock.is_still_ours()
    lock.release()
    assert time.monotonic() - started < LONG / 2
    assert sorted(os.listdir(tmp_path)) == ["writer.lock"]
    assert not lock.is_still_ours()


@pytest.mark.parametrize("refusal", ["ENOLCK", "ENOTSUP", "EOPNOTSUPP", "ENOSYS", "EINVAL"])
def test_without_locks_a_living_holder_is_found_by_its_lease_and_named(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    refuse_locks(monkeypatch, getattr(errno, refusal))
    holder = start(seconds=2, refusal=refusal)
    assert answer(holder) == "held"
    with pytest.raises(RunBusyError, match=rf"process {holder.pid} on \S+ since 20\d\d-"):
        ours(tmp_path).acquire()
    assert answer(holder, "ours?") == "True"
    assert answer(holder, "release") == "released"
    lock = ours(tmp_path)
    lock.acquire()
    assert lock.is_still_ours()
    lock.release()
    assert "writer.json" not in os.listdir(tmp_path)


def test_without_locks_a_killed_holder_of_this_host_is_known_to_be_dead_at_once(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_locks(monkeypatch)
    holder = start(refusal="ENOLCK")
    assert answer(holder) == "held"
    holder.kill()
    holder.wait()
    started = time.monotonic()
    lock = ours(tmp_path)
    lock.acquire()
    assert time.monotonic() - started < LONG / 2
    lock.release()


@pytest.mark.parametrize("host", ["", "elsewhere"])
def test_a_holder_that_sleeps_over_its_lease_is_taken_over_and_is_told_so_when_it_wakes_up(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    if not host:
        refuse_locks(monkeypatch)
    holder = start(seconds=SHORT, refusal="ENOLCK", host=host)
    assert answer(holder) == "held"
    os.kill(holder.pid, signal.SIGSTOP)
    os.waitpid(holder.pid, os.WUNTRACED)
    lock = ours(tmp_path, seconds=SHORT)
    lock.acquire()
    os.kill(holder.pid, signal.SIGCONT)
    assert answer(holder, "ours?") == "False"
    # It goes on renewing, in a file that has no name any more; and gives back nothing that is not its own.
    lease = (tmp_path / "writer.lease").stat().st_ino
    assert answer(holder, "release") == "released"
    assert lock.is_still_ours()
    assert (tmp_path / "writer.lease").stat().st_ino == lease
    third = start(seconds=LONG, refusal="ENOLCK")
    assert answer(third) == "RunBusyError"
    lock.release()


def test_a_holder_on_another_host_that_renews_its_lease_keeps_the_run_although_our_lock_says_nothing(
    tmp_path: Path, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    # Its locks do not reach us: it has none, while ours work.
    holder = start(seconds=2, refusal="ENOLCK", host="elsewhere")
    assert answer(holder) == "held"
    with pytest.raises(RunBusyError, match=f"process {holder.pid} on elsewhere since 20"):
        ours(tmp_path).acquire()
    assert answer(holder, "ours?") == "True"
    assert "on elsewhere held" in capsys.readouterr().err
    # What was watched in vain is free for others again.
    assert answer(holder, "release") == "released"
    lock = ours(tmp_path)
    lock.acquire()
    lock.release()


def elsewhere() -> dict[str, object]:
    there = dataclasses.replace(identify_self(), host="elsewhere", boot_id="another boot")
    return {**there.to_json(), "since": 0}


def test_a_holder_on_another_host_that_never_renews_is_taken_over_after_its_lease_and_not_before(
    tmp_path: Path,
) -> None:
    write_json(tmp_path / "writer.json", elsewhere())
    lock = ours(tmp_path, seconds=SHORT)
    started = time.monotonic()
    lock.acquire()
    assert time.monotonic() - started >= SHORT
    assert lock.is_still_ours()
    lock.release()


def test_a_holder_that_has_a_longer_lease_than_ours_is_watched_for_that_long(tmp_path: Path) -> None:
    write_json(tmp_path / "writer.json", {**elsewhere(), "lease_seconds": 2 * SHORT})
    lock = ours(tmp_path, seconds=SHORT / 10)
    started = time.monotonic()
    lock.acquire()
    assert time.monotonic() - started >= 2 * SHORT
    lock.release()


def test_a_holder_on_another_host_that_gives_up_while_it_is_watched_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(tmp_path / "writer.json", elsewhere())
    watching = threading.Event()
    monkeypatch.setattr(lock_module, "tell", lambda text: watching.set())
    lock = ours(tmp_path)
    starter = threading.Thread(target=lock.acquire)
    starter.start()
    assert watching.wait(LONG)
    (tmp_path / "writer.json").unlink()
    starter.join(LONG / 2)
    assert lock.is_still_ours()
    lock.release()


def test_of_many_that_start_at_once_without_locks_one_gets_the_run(tmp_path: Path, start: Start) -> None:
    starters = [start(seconds=2, refusal="ENOLCK") for _ in range(4)]
    assert sorted(answer(starter) for starter in starters) == ["RunBusyError"] * 3 + ["held"]


def test_a_process_does_not_hold_what_it_never_took_what_it_forked_or_what_somebody_removed(
    tmp_path: Path,
) -> None:
    lock = ours(tmp_path)
    assert not lock.is_still_ours()
    lock.acquire()
    child = os.fork()
    if child == 0:
        try:
            code = 1 if lock.is_still_ours() else 0
            lock.release()
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert lock.is_still_ours()
    assert (tmp_path / "writer.lease").exists()
    (tmp_path / "writer.json").unlink()
    assert not lock.is_still_ours()
    lock.release()


def test_a_successor_has_a_lease_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "writer.lease"
    old, new = Lease(path, 0.1), Lease(path, LONG)
    old.begin()
    new.begin()
    first = read_lease(path)
    # Renewed dozens of times meanwhile, by the old holder alone.
    assert not is_changed(lambda: read_lease(path), first, SHORT)
    old.end()
    assert read_lease(path) == first
    new.end()
    assert read_lease(path) is None


ME = ProcessIdentity(host="here", process_id=1, start_ticks=1, boot_id="boot")
GONE = dataclasses.replace(identify_self(), start_ticks=1)


@pytest.mark.parametrize(
    ("holder", "me", "with_locks", "without_locks"),
    [
        (ME, ME, "dead", "dead"),
        # This host, this boot: the kernel knows.
        (GONE, identify_self(), "dead", "dead"),
        # This host before it was booted, or another one of the same name.
        (dataclasses.replace(ME, boot_id="an earlier one"), ME, "dead", "unknown"),
        (dataclasses.replace(ME, boot_id=""), dataclasses.replace(ME, boot_id=""), "dead", "dead"),
        # Another name under the same kernel: a container that was started again.
        (dataclasses.replace(ME, host="c1"), dataclasses.replace(ME, host="c2"), "dead", "unknown"),
        (dataclasses.replace(ME, host="there", boot_id="other"), ME, "unknown", "unknown"),
        (dataclasses.replace(ME, host="there", boot_id=""), ME, "unknown", "unknown"),
    ],
)
def test_the_lease_is_asked_only_where_nothing_else_can_tell(
    holder: ProcessIdentity, me: ProcessIdentity, with_locks: str, without_locks: str
) -> None:
    assert judge(holder, me, has_locks=True) == with_locks
    assert judge(holder, me, has_locks=False) == without_locks


def test_a_living_process_of_this_host_keeps_its_lock_and_without_locks_its_lease_is_watched() -> None:
    parent = ProcessIdentity(**dataclasses.asdict(identify_self()))
    me = dataclasses.replace(parent, process_id=1)
    assert judge(parent, me, has_locks=True) == "alive"
    assert judge(parent, me, has_locks=False) == "unknown"
