"""A real run under a real supervisor, and the disasters that befall it."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unbroken.rundir import layout
from unbroken.rundir.control import request_save
from unbroken.rundir.heartbeat import Beat, read_heartbeat
from unbroken.rundir.journal import read_events
from unbroken.supervisor.plan import Plan
from unbroken.supervisor.progress import newest_listed
from unbroken.supervisor.restart_policy import RestartPolicy

from ..supervisor.conftest import Bench, is_running

SCRIPT = Path(__file__).with_name("disaster_script.py")
_LAUNCH = """
import json, sys
from unbroken.supervisor.launch import launch
from unbroken.supervisor.plan import Plan
launch(Plan.from_json(json.loads(sys.argv[1])))
"""
# Only what never comes is a failure: a machine that does much else may take its time.
_PATIENCE_SECONDS = 300.0


@dataclass(kw_only=True)
class World:
    """The run in `directory`, its script's `place`, and the memory group that all of it lives in, if any."""

    bench: Bench
    directory: Path
    place: Path
    group: Path | None = None
    dice: random.Random = field(default_factory=random.Random)
    # What befell it, and the attempt that it befell.
    history: list[tuple[str, int]] = field(default_factory=list)

    # -- what there is ------------------------------------------------------------------------------

    def attempt(self) -> int:
        return max(layout.attempts(self.directory), default=0)

    def beat(self) -> Beat | None:
        return read_heartbeat(layout.attempt_directory(self.directory, self.attempt()) / layout.HEARTBEAT)

    def trainer(self) -> int:
        self.until(self.beat, "a beat of the trainer")
        beat = self.beat()
        assert beat is not None
        return beat.process_id

    def supervisor(self) -> int:
        found = self.state()["supervisor"]["process_id"]
        assert isinstance(found, int)
        return found

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / layout.SUPERVISOR_FILE).read_text())
        return found

    def is_training(self) -> bool:
        beat = self.beat()
        return beat is not None and beat.phase == "training" and is_running(beat.process_id)

    def until(self, is_so: Callable[[], object], what: str) -> None:
        end = time.monotonic() + _PATIENCE_SECONDS
        while not is_so():
            assert time.monotonic() < end, f"{what}: not in time; {self.account()}"
            time.sleep(0.005)

    def account(self) -> str:
        journal = list(read_events(self.directory / layout.JOURNAL_FILE))[-6:]
        log = self.directory / layout.SUPERVISOR_LOG
        said = log.read_text()[-1500:] if log.exists() else ""
        attempts = layout.attempt_directory(self.directory, self.attempt()) / layout.OUTPUT_LOG
        output = attempts.read_text()[-1500:] if attempts.exists() else ""
        return f"{self.history[-5:]}\n{self.state()}\n{journal}\n{said}\n{output}\n{self.beat()}"

    # -- what is done -------------------------------------------------------------------------------

    def command(self) -> tuple[str, ...]:
        return (sys.executable, str(SCRIPT), str(self.place))

    def start(self) -> None:
        plan = Plan(
            directory=self.directory,
            command=self.command(),
            name="it",
            grace_seconds=60.0,
            policy=RestartPolicy(base_seconds=0.01, max_starts_per_hour=1_000_000),
        )
        self._call([sys.executable, "-P", "-c", _LAUNCH, json.dumps(plan.to_json())])

    def revive(self) -> None:
        self._call(self.bench.command("revive", str(self.directory)))

    def _call(self, command: list[str]) -> None:
        if self.group is not None:
            join = f'echo $$ > {self.group}/cgroup.procs && exec "$@"'
            command = ["/bin/sh", "-c", join, "sh", *command]
        # To a file: what lives on after the call inherits it, and a pipe would never end.
        with (self.bench.place / "calls.log").open("ab") as log:
            process = self.bench.popen(command, stdin=None, stdout=log, stderr=log)
            assert process.wait(60) == 0, (self.bench.place / "calls.log").read_text()[-3000:]

    def finish(self, steps: int) -> int:
        """Let it train for `steps` more steps and come to its end; return the last of them."""
        beat = self.beat()
        last = (beat.step if beat is not None else 0) + steps
        (self.place / "last-step").write_text(str(last))
        self.until(lambda: self.state().get("state") == "done", "the end")
        return last

    # -- what befalls it ----------------------------------------------------------------------------

    def befall(self, name: str) -> None:
        """Wait for a newer checkpoint and then for a random moment; let it happen; wait for training."""
        self.until(self.is_training, "training")
        newest = newest_listed(self.directory)
        request_save(self.directory)
        self.until(lambda: newest_listed(self.directory) != newest, "a newer checkpoint")
        # Not a wait for something to happen: the moment of the disaster is what is random here.
        time.sleep(self.dice.random() ** 2 * 0.3)
        self.history.append((name, self.attempt()))
        DISASTERS[name](self)
        self.until(self.is_training, f"training after {name}")

    def _ends_this_attempt(self) -> None:
        number = self.history[-1][1]
        self.until(lambda: self.attempt() > number, "a new attempt")

    def _kill_trainer(self, number: signal.Signals) -> None:
        os.kill(self.trainer(), number)
        self._ends_this_attempt()

    def kill_trainer(self) -> None:
        self._kill_trainer(signal.SIGKILL)

    def crash_trainer(self) -> None:
        self._kill_trainer(signal.SIGSEGV)

    def preempt_trainer(self) -> None:
        self._kill_trainer(signal.SIGTERM)

    def kill_worker(self) -> None:
        # Of the children of a trainer the data workers are those with its own command line.
        trainer = self.trainer()
        mine = Path(f"/proc/{trainer}/cmdline").read_bytes()
        workers = [child for child in _children(trainer) if _command_line(child) == mine]
        assert workers, "no data worker"
        os.kill(self.dice.choice(workers), signal.SIGKILL)
        self._ends_this_attempt()

    def eat_all_memory(self) -> None:
        (self.place / "hunger").touch()
        self._ends_this_attempt()

    def stop_and_start_again(self) -> None:
        os.kill(self.supervisor(), signal.SIGTERM)
        self.until(lambda: self.state()["state"] == "stopped", "the stop")
        assert self.state()["exit_code"] == 75, self.account()
        self.until(lambda: not is_running(self.supervisor()), "the end of the supervisor")
        self.start()

    def kill_supervisor(self) -> None:
        trainer, attempt = self.trainer(), self.attempt()
        os.kill(self.supervisor(), signal.SIGKILL)
        self.until(lambda: not is_running(self.supervisor()), "the end of the supervisor")
        self.revive()
        assert (self.trainer(), self.attempt()) == (trainer, attempt), "it was not interrupted"
        assert is_running(trainer), self.account()

    def kill_supervisor_and_trainer(self) -> None:
        both = [self.supervisor(), self.trainer()]
        for process_id in self.dice.sample(both, 2):
            os.kill(process_id, signal.SIGKILL)
        self.until(lambda: not any(map(is_running, both)), "the end of both")
        if self.attempt() == self.history[-1][1]:
            self.revive()
        self._ends_this_attempt()

    def fill_the_disk(self) -> None:
        attempt, filler = self.attempt(), self.directory.parent / "filler"
        request_save(self.directory)
        _fill(filler)
        time.sleep(0.3 + self.dice.random())
        filler.unlink()
        assert self.attempt() == attempt, f"a full disk is a pause: {self.account()}"


DISASTERS: dict[str, Callable[[World], None]] = {
    "kill trainer": World.kill_trainer,
    "crash trainer": World.crash_trainer,
    "preempt trainer": World.preempt_trainer,
    "kill worker": World.kill_worker,
    "eat all memory": World.eat_all_memory,
    "stop and start again": World.stop_and_start_again,
    "kill supervisor": World.kill_supervisor,
    "kill supervisor and trainer": World.kill_supervisor_and_trainer,
    "fill the disk": World.fill_the_disk,
}


def _children(process_id: int) -> list[int]:
    text = Path(f"/proc/{process_id}/task/{process_id}/children").read_text()
    return [int(child) for child in text.split()]


def _command_line(process_id: int) -> bytes:
    try:
        return Path(f"/proc/{process_id}/cmdline").read_bytes()
    except OSError:
        return b""


def _fill(path: Path) -> None:
    free = shutil.disk_usage(path.parent).free
    with path.open("wb", buffering=0) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, max(1, free - (1 << 20)))
            while True:
                file.seek(0, os.SEEK_END)
                file.write(b"x" * 4096)
        except OSError:
            # Full, which is what is wanted.
            return
