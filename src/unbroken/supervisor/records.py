"""What the supervisor leaves on disk: journal, snapshot, the end of each attempt, its own words."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from unbroken.errors import StorageError, StorageFullError
from unbroken.rundir import layout
from unbroken.rundir.files import write_json
from unbroken.rundir.journal import Journal
from unbroken.supervisor.judging.verdict import ExitStatus, Verdict
from unbroken.supervisor.side.ballast import Ballast
from unbroken.supervisor.states import Snapshot, write_state


class Records:
    """Writes the records of the run in `directory`.

    A full or vanished disk must not end supervision, which is there to outlast it: some space is set aside
    for them, and what cannot be written all the same is reported to supervisor.log, and the run goes on.
    """

    def __init__(self, directory: Path, snapshot: Snapshot) -> None:
        self._directory = directory
        self._journal = Journal(directory / layout.JOURNAL_FILE)
        self._ballast = Ballast(directory / layout.BALLAST)
        self._listeners: list[Callable[[str, dict[str, Any]], None]] = []
        self.snapshot = snapshot

    def event(self, kind: str, /, **fields: Any) -> None:
        """Append an event to the journal, and tell those who listen."""
        self._write(lambda: self._journal.append(kind, **fields))
        for listener in self._listeners:
            listener(kind, fields)

    def listen(self, listener: Callable[[str, dict[str, Any]], None]) -> None:
        """Call `listener(kind, fields)` after each event from now on."""
        self._listeners.append(listener)

    def keep_space(self) -> None:
        """Set space aside for these records again, if it was needed and there is room now."""
        self._ballast.keep()

    def show(self, **changes: Any) -> None:
        """Change the snapshot that `status` reads."""
        self.snapshot = replace(self.snapshot, changed_seconds=time.time(), **changes)
        self._write(lambda: write_state(self._directory, self.snapshot))

    def attempt_ended(
        self,
        attempt: int,
        *,
        status: ExitStatus | None,
        verdict: Verdict,
        lived_seconds: float,
        step: int | None,
        record: dict[str, Any],
    ) -> None:
        """Leave exit.json and verdict.json with an attempt, and the event in the journal.

        `record` is for a supervisor that takes over.
        """
        directory = layout.attempt_directory(self._directory, attempt)
        end = {
            "code": status.code if status is not None else None,
            "signal": status.signal_name if status is not None else "",
            "ended": time.time(),
            "lived_seconds": round(lived_seconds, 3),
            "step": step,
        }
        self._write(lambda: write_json(directory / layout.EXIT_FILE, end))
        self._write(lambda: write_json(directory / layout.VERDICT_FILE, asdict(verdict)))
        self.event("attempt-ended", attempt=attempt, **end, **_brief(verdict), record=record)
        self.show(outcome=verdict.outcome, evidence=verdict.evidence)

    def close(self) -> None:
        """Make the journal durable and release it, and the space that was set aside."""
        self._write(self._journal.sync)
        self._journal.close()
        self._ballast.remove()

    def _write(self, write: Callable[[], None]) -> None:
        while True:
            try:
                write()
            except StorageFullError as error:
                if self._ballast.give_up():
                    continue
                say(f"could not {error.message}")
            except StorageError as error:
                say(f"could not {error.message}")
            return


def say(text: str) -> None:
    """Write one line to the supervisor's own log, if that is possible."""
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n"
    # The last resort has none: the log may be on the same full disk.
    with suppress(OSError):
        os.write(2, line.encode(errors="replace"))


def _brief(verdict: Verdict) -> dict[str, Any]:
    names = ("outcome", "cause", "confidence", "evidence", "hint", "is_saved")
    return {name: getattr(verdict, name) for name in names}
