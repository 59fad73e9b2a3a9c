from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import unbroken.errors
from unbroken.rundir import layout
from unbroken.rundir.identity import open_run
from unbroken.rundir.journal import read_events
from unbroken.rundir.processes import identify_self
from unbroken.supervisor.cells import find_cell
from unbroken.supervisor.host.engines import ENGINES
from unbroken.supervisor.records import Records
from unbroken.supervisor.registry import register
from unbroken.supervisor.states import Snapshot

_SOURCES = Path(unbroken.errors.__file__).parents[1]


class Bench:
    """A place to start real runs in: own state directory, scripts, and nothing left behind."""

    def __init__(self, place: Path) -> None:
        self.place = place
        engines = tuple(name for engine in ENGINES for name in engine.variables)
        left_out = ("UNBROKEN", *engines)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
        self.environment = {**kept, "XDG_STATE_HOME": str(place / "state"), "PYTHONPATH": str(_SOURCES)}

    def script(self, name: str, text: str) -> str:
        path = self.place / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-P", "-m", "unbroken.cli.main", *arguments]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return self.popen(self.command(*arguments), stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)

    def popen(self, command: list[str], **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, cwd=self.place, env=self.environment, text=True, errors="replace", **options
        )

    def cli(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def run(self, *command: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        return self.cli("run", "--name", "it", "--backoff", "0.01", *options, "--", *command)

    def python(self, script: str, *options: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, script, options=options)

    def made(self, *outputs: bytes, directory: Path | None = None) -> Path:
        """A run that is known, with these outputs of its attempts, which nothing ever kept going."""
        directory = directory or self.directory
        open_run(directory)
        with patch.dict(os.environ, self.environment):
            register(directory.name, directory)
        for attempt, content in enumerate(outputs, start=1):
            place = layout.attempt_directory(directory, attempt)
            place.mkdir(parents=True)
            (place / layout.OUTPUT_LOG).write_bytes(content)
        return directory

    @property
    def directory(self) -> Path:
        return self.place / "runs" / "it"

    def state(self) -> dict[str, Any]:
        return self.read("supervisor.json")

    def read(self, name: str) -> dict[str, Any]:
        try:
            value: dict[str, Any] = json.loads((self.directory / name).read_text())
        except FileNotFoundError:
            return {}
        return value

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """What the supervisor noted in the journal: events of these kinds, or all of them."""
        path = self.directory / "journal.jsonl"
        return [event for event in read_events(path) if not kinds or event["kind"] in kinds]

    def verdict(self, attempt: int) -> dict[str, Any]:
        return self.read(f"attempts/{attempt:04d}/verdict.json")

    def attempts(self) -> int:
        return len(list((self.directory / "attempts").iterdir()))

    def output(self, attempt: int = 1) -> str:
        path = self.directory / f"attempts/{attempt:04d}/out.log"
        return path.read_text() if path.exists() else ""

    def until(self, is_so: Callable[[], object], seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < end, f"not within {seconds} s; {self.state()} {self.output()}"
            time.sleep(0.02)

    def strays(self) -> list[int]:
        """All processes that were started from here: they inherit the state directory.

        One that is just ending is not found, for it gives up its memory, and with it the environment, before
        it is dead: wait for that with `is_running`.
        """
        tag = os.fsencode(f"XDG_STATE_HOME={self.environment['XDG_STATE_HOME']}")
        found = []
        for entry in os.listdir("/proc"):
            try:
                if entry.isdecimal() and tag in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
            except OSError:
                continue
        return found

    def sweep(self) -> None:
        while strays := self.strays():
            for process_id in strays:
                try:
                    os.kill(process_id, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.02)
        # Those of supervisors that were killed.
        for attempt in self.place.glob("**/attempts/*"):
            cell = find_cell(attempt)
            if cell is not None:
                cell.remove()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    try:
        yield bench
        bench.until(lambda: not bench.strays(), seconds=10)
    finally:
        bench.sweep()


def made_records(directory: Path) -> Records:
    """The records of a supervisor that this process plays."""
    now = time.time()
    snapshot = Snapshot(
        state="running",
        reason="",
        run_id="id",
        name="it",
        command=("true",),
        supervisor=identify_self(),
        started_seconds=now,
        changed_seconds=now,
        grace_seconds=1.0,
    )
    return Records(directory, snapshot)


def is_running(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


@pytest.fixture
def running() -> Callable[[int], bool]:
    return is_running


# A training script of the library's manners without the library: it counts steps until it is told to
# stop, says last words, and ends as the library would.
TRAINING = """
import os, signal, sys, time
from pathlib import Path
from unbroken.rundir.control import read_stop
from unbroken.rundir.heartbeat import Heartbeat
from unbroken.rundir.last_words import LastWords, write_last_words

run = Path(os.environ["UNBROKEN_RUN_DIR"])
here = run / "attempts" / f"{int(os.environ['UNBROKEN_ATTEMPT']):04d}"
write_last_words(here, LastWords(ending="running", step=0))
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
beat = Heartbeat(here / "heartbeat")
step = 0
while not asked and read_stop(run) is None:
    step += 1
    beat.beat(phase="step", step=step, checkpoint_step=-1)
    if step == 1:
        print("training", flush=True)
    time.sleep(0.01)
write_last_words(here, LastWords(ending="stopped", step=step, reason="asked to"))
print("saved", flush=True)
sys.exit(75)
"""


@pytest.fixture
def training(bench: Bench) -> str:
    return bench.script("train.py", TRAINING)
