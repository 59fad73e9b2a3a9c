"""Whether the time to save in order is enough, by how long the last save took."""

from __future__ import annotations

from pathlib import Path

from unbroken.rundir import layout
from unbroken.rundir.heartbeat import read_heartbeat
from unbroken.supervisor.records import Records
from unbroken.supervisor.watcher import Look, MakeWatcher, Want

HINT = "give it more time by `unbroken run --grace SECONDS`, or save less"


def is_too_short(grace_seconds: float, save_seconds: float) -> bool:
    """Tell whether a save like the last one would be cut; `save_seconds` is 0 if there was none."""
    return save_seconds > grace_seconds


def last_save_seconds(run_directory: Path) -> float:
    """Return how long the last save of the run took until it was durable; 0 if that is not known."""
    for attempt in reversed(layout.attempts(run_directory)):
        beat = read_heartbeat(layout.attempt_directory(run_directory, attempt) / layout.HEARTBEAT)
        if beat is not None and beat.save_seconds > 0:
            return beat.save_seconds
    return 0.0


def in_words(run_directory: Path, grace_seconds: float) -> str:
    """Return how long the run has to save when it is asked to stop, and whether that is enough."""
    said = f"a stop leaves it {grace_seconds:g} s to save"
    save_seconds = last_save_seconds(run_directory)
    if is_too_short(grace_seconds, save_seconds):
        return f"{said}, and the last save took {save_seconds:.1f} s: {HINT}"
    return said


def grace_watch(grace_seconds: float, records: Records) -> MakeWatcher:
    """Return what makes the watcher that warns, once, when saves take longer than `grace_seconds`."""
    return lambda _: _GraceWatch(grace_seconds, records)


class _GraceWatch:
    def __init__(self, grace_seconds: float, records: Records) -> None:
        self._grace_seconds = grace_seconds
        self._records = records
        self._was_too_short = False

    def look(self, look: Look) -> Want:
        save_seconds = look.beat.save_seconds if look.beat is not None else 0.0
        found = is_too_short(self._grace_seconds, save_seconds)
        if found and not self._was_too_short:
            self._warn(save_seconds)
        self._was_too_short = self._was_too_short or found
        return None

    def end(self) -> None:
        pass

    def _warn(self, save_seconds: float) -> None:
        self._records.event(
            "grace-too-short",
            grace_seconds=self._grace_seconds,
            save_seconds=round(save_seconds, 3),
            hint=HINT,
        )
        hint = f"the last save took {save_seconds:.1f} s, and a stop leaves {self._grace_seconds:g} s: {HINT}"
        self._records.show(hint=hint)
