"""What training wants people to be told, passed on as events of the supervisor, each once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unbroken.errors import StorageError
from unbroken.rundir import layout
from unbroken.rundir.journal import parse_event, read_events
from unbroken.supervisor.records import Records, say
from unbroken.supervisor.watcher import MakeWatcher, Started, Want, Watcher


def alarm_watch(records: Records) -> MakeWatcher:
    """Return what makes the watchers that pass on the alarms of an attempt's training."""

    def make(started: Started) -> Watcher:
        return Alarms(started.run_directory, started.attempt, records, goes_on=started.is_adopted)

    return make


class Alarms:
    """The alarms of one attempt. `goes_on` says that another supervisor may have passed on the first."""

    def __init__(self, run_directory: Path, attempt: int, records: Records, *, goes_on: bool) -> None:
        self._path = layout.attempt_directory(run_directory, attempt) / layout.ALARMS_FILE
        self._attempt = attempt
        self._records = records
        self._read_bytes = _passed_on(run_directory, attempt) if goes_on else 0

    def look(self, _: object = None) -> Want:
        """Pass on what is new; nearly always that is one question to the file system."""
        try:
            if self._path.stat().st_size > self._read_bytes:
                self._pass_on()
        except FileNotFoundError:
            pass
        except OSError as error:
            say(f"alarms of training may be missing: {error}")
        return None

    def end(self) -> None:
        """Pass on the last ones: what training had to say before it ended."""
        self.look()

    def _pass_on(self) -> None:
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            # What has no end yet is being written, or never will be.
            whole, newline, _ = file.read().rpartition(b"\n")
        for line in (whole + newline).splitlines(keepends=True):
            self._read_bytes += len(line)
            event = parse_event(line)
            if event is not None:
                self._tell(event)

    def _tell(self, event: dict[str, Any]) -> None:
        text, hint = str(event.get("text", "")), str(event.get("hint", ""))
        self._records.event(
            "alarm",
            alarm=str(event.get("what", "")),
            source="training",
            attempt=self._attempt,
            text=text,
            hint=hint,
            end=self._read_bytes,
        )


def _passed_on(run_directory: Path, attempt: int) -> int:
    """Return up to which byte the alarms of an attempt were passed on, by what the journal tells."""
    try:
        ends = [
            event["end"]
            for event in read_events(run_directory / layout.JOURNAL_FILE)
            if event["kind"] == "alarm" and event.get("attempt") == attempt and "end" in event
        ]
    except StorageError as error:
        say(f"alarms of training may be told twice: {error.message}")
        return 0
    return ends[-1] if ends else 0
