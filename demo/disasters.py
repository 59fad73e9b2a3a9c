"""The disasters: what may happen to a run, when it shall happen, and doing it for real."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from trainer import Deadline, DemoError, SupervisedRun

from unbroken.checkpoint.store import CheckpointStore
from unbroken.errors import EXIT_RUN_ME_AGAIN
from unbroken.rundir import layout
from unbroken.rundir.files import read_json
from unbroken.rundir.journal import read_events
from unbroken.rundir.processes import identify

Kind: TypeAlias = Literal["kill-in-step", "kill-in-save", "terminate", "flip-byte"]

NAMES: dict[Kind, str] = {
    "kill-in-step": "SIGKILL in mid-step",
    "kill-in-save": "SIGKILL in mid-save",
    "terminate": "SIGTERM",
    "flip-byte": "a byte flipped on disk",
}
_KINDS: tuple[Kind, ...] = ("kill-in-step", "kill-in-save", "terminate", "flip-byte", "kill-in-step")
_MAX_STEP_SECONDS = 0.02
# One shard, the manifest and its digest: what a save writes before it commits.
_FILES_OF_A_SAVE = 3
_SECONDS = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Disaster:
    """One of them, due when training has done `at_step` steps."""

    kind: Kind
    at_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What happened: the attempt that it ended had done `at_step` steps; where the next one went on."""

    name: str
    at_step: int
    resumed_from: str
    resumed_step: int
    seen: str

    @property
    def repeated_steps(self) -> int:
        return max(0, self.at_step - self.resumed_step)


def plan_disasters(seed: int, steps: int, *, save_every: int) -> list[Disaster]:
    """Return all kinds in a random order at random moments of a run of `steps` steps.

    None comes before there are three checkpoints to fall back to, nor in the last tenth.
    """
    chance = random.Random(seed)
    kinds = list(_KINDS)
    chance.shuffle(kinds)
    first, last = 3 * save_every, steps * 9 // 10
    width = (last - first) // len(kinds)
    if width < 2 * save_every:
        raise DemoError(
            f"{steps} steps are too few for {len(kinds)} disasters, with a save every {save_every}"
        )
    # Each in a slot of its own, and not at its end: the next one needs a run that trains again.
    return [
        Disaster(kind=kind, at_step=first + width * slot + chance.randrange(width * 3 // 4))
        for slot, kind in enumerate(kinds)
    ]


def strike(run: SupervisedRun, disaster: Disaster, chance: random.Random) -> list[Event]:
    """Let it happen, wait until the run trains again, and return what was seen.

    Raises DemoError if the run did not react as promised.
    """
    deadline = Deadline(f"{NAMES[disaster.kind]} at step {disaster.at_step}", _SECONDS)
    return _ACTS[disaster.kind](run, disaster, chance, deadline)


def _kill_in_step(
    run: SupervisedRun, disaster: Disaster, chance: random.Random, deadline: Deadline
) -> list[Event]:
    process, attempt = run.wait_for_step(disaster.at_step, deadline), run.newest_attempt
    # Anywhere in the step, not where the heartbeat is: forward, backward, optimizer.
    time.sleep(chance.uniform(0.0, _MAX_STEP_SECONDS))
    _kill(process, deadline)
    return [_resumed(run, attempt, NAMES[disaster.kind], "restarted by the supervisor", deadline)]


def _kill_in_save(
    run: SupervisedRun, disaster: Disaster, chance: random.Random, deadline: Deadline
) -> list[Event]:
    events: list[Event] = []
    step = disaster.at_step
    while True:
        process, attempt = run.wait_for_step(step, deadline), run.newest_attempt
        files = chance.randint(1, _FILES_OF_A_SAVE)
        _wait_for_half_a_save(run, files, deadline)
        _kill(process, deadline)
        # Looked at while the trainer is dead, and before its successor sweeps.
        left = _staged(run)
        if left:
            break
        events.append(_resumed(run, attempt, "SIGKILL just after a save", "missed the save", deadline))
        step = events[-1].at_step + 1
    seen = f"left {sum(left.values())} files of a save, swept at the restart"
    event = _resumed(run, attempt, NAMES[disaster.kind], seen, deadline)
    swept = _began(run, attempt + 1)["swept"]
    if not left.keys() <= set(swept):
        raise DemoError(f"{', '.join(left)} was left by a killed save, and not swept: {swept}")
    return [*events, event]


def _terminate(
    run: SupervisedRun, disaster: Disaster, chance: random.Random, deadline: Deadline
) -> list[Event]:
    process, attempt = run.wait_for_step(disaster.at_step, deadline), run.newest_attempt
    os.kill(process, signal.SIGTERM)
    event = _resumed(run, attempt, NAMES[disaster.kind], "saved, exit code 75, restarted", deadline)
    end = read_json(layout.attempt_directory(run.directory, attempt) / layout.EXIT_FILE)
    if end is None or end["code"] != EXIT_RUN_ME_AGAIN or event.repeated_steps:
        raise DemoError(f"after SIGTERM: expected a save and exit code {EXIT_RUN_ME_AGAIN}, found {end}")
    return [event]


def _flip_byte(
    run: SupervisedRun, disaster: Disaster, chance: random.Random, deadline: Deadline
) -> list[Event]:
    run.wait_for_step(disaster.at_step, deadline)
    run.unbroken("stop", str(run.directory), deadline=deadline)
    attempt = run.newest_attempt
    newest = CheckpointStore(run.directory).names()[-1]
    shard = chance.choice(sorted((run.directory / layout.CHECKPOINTS / newest).glob("*.safetensors")))
    place = flip_byte(shard, chance)
    run.start(deadline)
    event = _resumed(run, attempt, NAMES[disaster.kind], f"byte {place:,} of {newest}: quarantined", deadline)
    if event.resumed_from == newest or not (run.directory / layout.QUARANTINE / newest).is_dir():
        raise DemoError(f"{newest} is damaged, and the run went on from {event.resumed_from}")
    return [event]


_Act: TypeAlias = Callable[[SupervisedRun, Disaster, random.Random, Deadline], list[Event]]
_ACTS: dict[Kind, _Act] = {
    "kill-in-step": _kill_in_step,
    "kill-in-save": _kill_in_save,
    "terminate": _terminate,
    "flip-byte": _flip_byte,
}


def flip_byte(path: Path, chance: random.Random) -> int:
    """Change one byte of a file, at a random place, into another random one; return the place."""
    data = bytearray(path.read_bytes())
    place = chance.randrange(len(data))
    data[place] ^= chance.randrange(1, 256)
    path.write_bytes(data)
    return place


def _kill(process: int, deadline: Deadline) -> None:
    """Kill the trainer, and return when it is dead."""
    os.kill(process, signal.SIGKILL)
    deadline.wait(lambda: identify(process) is None, look_seconds=0.001)


def _wait_for_half_a_save(run: SupervisedRun, files: int, deadline: Deadline) -> None:
    """Return at the moment when a checkpoint that is being written has `files` files, or more."""
    # A save is over in a few milliseconds: looked at as often as possible.
    deadline.wait(lambda: max(_staged(run).values(), default=0) >= files, look_seconds=0.0001)


def _staged(run: SupervisedRun) -> dict[str, int]:
    """Return the names of checkpoints that are being written, with the number of their files."""
    folder = run.directory / layout.CHECKPOINTS
    found = {}
    for name in os.listdir(folder):
        # It may be committed, and so be gone under this name, between two looks.
        with suppress(FileNotFoundError):
            if name.startswith(layout.STAGING_PREFIX):
                found[name] = len(os.listdir(folder / name))
    return found


def _resumed(run: SupervisedRun, attempt: int, name: str, seen: str, deadline: Deadline) -> Event:
    """Return the event that ended `attempt`, once the next one trains."""
    run.wait_for_attempt(attempt + 1, deadline)
    began = _began(run, attempt + 1)
    ended = layout.attempt_directory(run.directory, attempt) / layout.events_file()
    steps = [event["step"] for event in read_events(ended) if event["kind"] in ("began", "step")]
    if began["checkpoint"] is None:
        raise DemoError(f"{name} at step {steps[-1]}: the run began anew instead of going on")
    return Event(
        name=name,
        at_step=steps[-1],
        resumed_from=began["checkpoint"],
        resumed_step=began["step"],
        seen=seen,
    )


def _began(run: SupervisedRun, attempt: int) -> dict[str, Any]:
    path = layout.attempt_directory(run.directory, attempt) / layout.events_file()
    return next(event for event in read_events(path) if event["kind"] == "began")
