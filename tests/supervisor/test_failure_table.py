"""Each kind of failure that a training run meets, made for real where a container can make it.

One supervised run goes through all of them, an attempt for each. Those with tests of their own are not
here: want of memory in test_memory_kills, hangs, stops and preemptions, disks, other supervisors.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pytest

from .conftest import Bench

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What happens in an attempt, as Python, and what is to be said of it."""

    code: str
    outcome: str
    kind: str = ""
    cause: str = ""
    said: str = ""


_SHARED = shutil.disk_usage("/dev/shm")
_HAS_SHARED = _SHARED.total >= 1 << 30 and _SHARED.free > _SHARED.total // 5

_ROWS = {
    # The first makes a step: then nothing that follows is a typo.
    "a segmentation fault": Row(
        code="""
            Heartbeat(here / "heartbeat").beat(phase="training", step=1, checkpoint_step=-1)
            import ctypes; ctypes.string_at(0)
        """,
        outcome="signalled",
        kind="SIGSEGV",
        said="ended by SIGSEGV",
    ),
    "an abort in C code": Row(code="os.abort()", outcome="signalled", kind="SIGABRT"),
    "a bus error": Row(
        code="""
            import mmap
            with open(here / "file", "wb+") as file:
                file.truncate(4096)
                view = mmap.mmap(file.fileno(), 4096)
                file.truncate(0)
                view[0]
        """,
        outcome="signalled",
        kind="SIGBUS",
        # As in a container, where it is small: then that is as good a guess.
        cause="" if _HAS_SHARED else "shared-memory",
        said="/dev/shm",
    ),
    "a worker that ended by itself": Row(
        code="""
            from concurrent.futures import ProcessPoolExecutor
            with ProcessPoolExecutor(1) as pool:
                pool.submit(os._exit, 3).result()
        """,
        outcome="failed",
        kind="concurrent.futures.process.BrokenProcessPool",
        # Whatever the counters of a machine say that others use too.
        said="out of memory",
    ),
    "a full disk": Row(
        code='open("/dev/full", "w", buffering=1).write("x\\n")',
        outcome="failed",
        kind="OSError",
        cause="disk-full",
    ),
    "a limit of memory": Row(
        code="""
            import resource
            resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
            bytearray(2 << 30)
        """,
        outcome="failed",
        kind="MemoryError",
        cause="memory",
    ),
    "a connection that is refused": Row(
        code="""
            import socket
            free = socket.socket(); free.bind(("127.0.0.1", 0))
            socket.create_connection(free.getsockname())
        """,
        outcome="failed",
        kind="ConnectionRefusedError",
        cause="network",
    ),
    "memory of a device": Row(
        code="""
            class OutOfMemoryError(RuntimeError): __module__ = "torch"
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        """,
        outcome="failed",
        kind="torch.OutOfMemoryError",
        cause="device-memory",
    ),
    "a time-out between ranks": Row(
        code="""
            class DistBackendError(RuntimeError): __module__ = "torch.distributed"
            raise DistBackendError("[Rank 1] Watchdog caught collective operation timeout")
        """,
        outcome="failed",
        kind="torch.distributed.DistBackendError",
        cause="collective",
    ),
    "last words against the exit code": Row(
        code="""
            write_last_words(here, LastWords(ending="failed", step=5, kind="KeyError", message="'x'"))
            sys.exit(0)
        """,
        outcome="failed",
        kind="KeyError",
        said="its process: exit code 0",
    ),
    "no last word": Row(
        code='write_last_words(here, LastWords(ending="running", step=5))',
        outcome="vanished",
        said="never said that it completed",
    ),
    "a signal that somebody sent": Row(code="os.kill(os.getpid(), 15)", outcome="signalled", kind="SIGTERM"),
    "the end": Row(
        code='write_last_words(here, LastWords(ending="completed", step=9))',
        outcome="completed",
        said="it completed, at step 9",
    ),
}

_SUPERVISE = """
import sys
from pathlib import Path
from unbroken.errors import StorageFullError
from unbroken.supervisor import supervisor
from unbroken.supervisor.plan import Plan
from unbroken.supervisor.restart_policy import RestartPolicy
from unbroken.supervisor.stopping import block_signals
from unbroken.supervisor.supervisor import Supervisor

# Before the third attempt the disk is full, for once.
full = {2: StorageFullError("attempts: no space", hint="free some")}
def new_attempt(directory, *, make=supervisor.new_attempt):
    error = full.pop(len(list((directory / "attempts").glob("*"))), None)
    if error is not None:
        raise error
    return make(directory)

supervisor.new_attempt = new_attempt
block_signals()
policy = RestartPolicy(base_seconds=0.0, max_failures=100, max_starts_per_hour=100)
plan = Plan(directory=Path(sys.argv[1]), command=(sys.executable, sys.argv[2]), policy=policy)
sys.exit(Supervisor(plan).run())
"""
_LIBRARY = """
from unbroken.rundir.heartbeat import Heartbeat
from unbroken.rundir.last_words import LastWords, write_last_words
"""
_HEAD = """
import os, sys
from pathlib import Path
attempt = int(os.environ["UNBROKEN_ATTEMPT"])
here = Path(os.environ["UNBROKEN_RUN_DIR"]) / "attempts" / f"{attempt:04d}"
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A run that has gone through all rows, one attempt for each."""
    bench = Bench(tmp_path_factory.mktemp("table"))
    codes = [(bench.place / f"row{number}.py", row.code) for number, row in enumerate(_ROWS.values(), 1)]
    for path, code in codes:
        is_of_ours = "Heartbeat(" in code or "LastWords(" in code
        path.write_text((_LIBRARY if is_of_ours else "") + dedent(code))
    train = bench.script(
        "train.py",
        f"""{_HEAD}
row = Path(__file__).with_name(f"row{{attempt}}.py")
exec(compile(row.read_text(), row, "exec"))
""",
    )
    supervise = bench.script("supervise.py", _SUPERVISE)
    try:
        subprocess.run(
            [sys.executable, supervise, str(bench.directory), train],
            env=bench.environment,
            cwd=bench.place,
            timeout=120,
            check=False,
            capture_output=True,
        )
        yield bench
    finally:
        bench.sweep()


@pytest.mark.parametrize("name", _ROWS)
def test_each_failure_is_called_by_its_name(run: Bench, name: str) -> None:
    row, verdict = _ROWS[name], run.verdict(list(_ROWS).index(name) + 1)
    assert (verdict["outcome"], verdict["cause"]) == (row.outcome, row.cause), verdict
    assert verdict["kind"] == row.kind, verdict
    assert row.said in " ".join(verdict["evidence"])
    assert not row.cause or verdict["hint"] or row.cause == "network"


def test_the_run_went_on_after_each_and_ended_well(run: Bench) -> None:
    assert run.attempts() == len(_ROWS)
    assert run.state()["state"] == "done"


def test_a_full_disk_between_two_attempts_is_waited_for_like_one_within(run: Bench) -> None:
    reasons = [event["reason"] for event in _events(run, "decision")]
    (reason,) = [reason for reason in reasons if "no attempt can be made" in reason]
    assert reason == (
        "no attempt can be made: attempts: no space; failure 1 of 20 allowed without a newer checkpoint"
    )


def _events(bench: Bench, kind: str) -> list[dict[str, Any]]:
    lines = (bench.directory / "journal.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def test_a_script_that_fails_at_step_7_each_time_is_held_and_one_that_gets_farther_is_not(
    bench: Bench,
) -> None:
    script = bench.script(
        "train.py",
        f"""{_LIBRARY}{_HEAD}
write_last_words(here, LastWords(ending="running", step=0))
step = 7 if attempt > 2 else 4 + attempt
Heartbeat(here / "heartbeat").beat(phase="training", step=step, checkpoint_step=-1)
raise ValueError("bad sample")
""",
    )
    assert bench.python(script).returncode == 78
    # Steps 5, 6, 7, and 7 once more.
    assert [event["step"] for event in _events(bench, "attempt-ended")] == [5, 6, 7, 7]
    assert "2 times in a row at step 7" in bench.state()["reason"]


def test_a_pipe_does_not_hide_that_its_command_failed(bench: Bench) -> None:
    script = bench.script("train.py", "raise ValueError('bad')\n")
    assert bench.run("sh", "-c", f"{sys.executable} {script} 2>&1 | cat").returncode == 78
    verdict = bench.verdict(1)
    assert (verdict["outcome"], verdict["kind"], verdict["confidence"]) == ("failed", "ValueError", "likely")


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("fails_by", "kind"), [("os.kill(os.getpid(), 11)", "SIGSEGV"), ("1 / 0", "ZeroDivisionError")]
)
def test_a_launchers_exit_code_does_not_hide_what_its_rank_died_of(
    bench: Bench, fails_by: str, kind: str
) -> None:
    torchrun = shutil.which("torchrun")
    if torchrun is None:
        pytest.skip("needs torchrun")
    script = bench.script(
        "train.py", f"import os, time\nif os.environ['RANK'] == '1':\n    {fails_by}\ntime.sleep(60)\n"
    )
    command = (torchrun, "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
    bench.run(*command, script, options=("--max-restarts", "0"))
    verdict = bench.verdict(1)
    assert verdict["kind"] == kind
    assert any("rank 1 (process " in line for line in verdict["evidence"])


def _skipped(rows: Sequence[tuple[str, str]]) -> list[Any]:
    return [
        pytest.param(id=name, marks=pytest.mark.skip(reason=reason))  # type: ignore[call-arg]
        for name, reason in rows
    ]


@pytest.mark.parametrize(
    (),
    _skipped(
        [
            ("a GPU that falls off its bus", "needs an NVIDIA driver that logs an Xid"),
            ("memory of a real GPU", "needs a GPU"),
            ("a process in state D", "needs a file system or a device that does not answer"),
            ("an out-of-memory kill in version 2", "needs control groups of version 2 with memory"),
            ("systemd-oomd and earlyoom", "need a machine that runs them"),
            ("a container that is made anew", "needs a container engine"),
            ("a reboot and a loss of power", "need a machine that may be started again"),
            ("a clock that jumps", "needs a clock that may be set"),
        ]
    ),
)
def test_what_a_container_cannot_do_is_left_to_real_machines() -> None:
    raise AssertionError("nothing to do here")
