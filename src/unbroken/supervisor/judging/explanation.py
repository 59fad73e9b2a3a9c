"""Why the attempts of a run ended and what followed, read from its records; nobody need run for that."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unbroken.errors import StorageError, UsageError
from unbroken.rundir import layout
from unbroken.rundir.files import read_json
from unbroken.rundir.heartbeat import read_heartbeat
from unbroken.rundir.journal import number, read_events
from unbroken.rundir.last_words import read_last_words
from unbroken.rundir.processes import ProcessIdentity, is_alive
from unbroken.supervisor.judging.outcome import judge
from unbroken.supervisor.judging.verdict import Facts, Verdict
from unbroken.supervisor.states import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the records tell of an attempt; `verdict` is None while it runs, `decision` if none followed."""

    attempt: int
    is_running: bool
    verdict: Verdict | None
    started: float | None = None
    ended: float | None = None
    lived_seconds: float | None = None
    step: int | None = None
    decision: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as `unbroken why --json` documents it."""
        verdict = asdict(self.verdict) if self.verdict is not None else {}
        names = ("outcome", "cause", "confidence", "kind", "message", "frame", "hint", "is_saved")
        return {
            "attempt": self.attempt,
            "is_running": self.is_running,
            **{name: verdict.get(name) for name in names},
            "evidence": list(verdict.get("evidence", ())),
            "step": self.step,
            "started": self.started,
            "ended": self.ended,
            "lived_seconds": self.lived_seconds,
            "decision": self.decision,
        }


def tell(directory: Path, state: Snapshot | None) -> list[Told]:
    """Return what is known of all attempts of the run in `directory`, in order. Raises StorageError."""
    starts, ends, decisions = _from_journal(directory)
    attempts = layout.attempts(directory)
    return [
        _told(
            layout.attempt_directory(directory, attempt),
            attempt,
            is_running=attempt not in ends and _is_running(directory, state, attempt, newest=attempts[-1]),
            start=starts.get(attempt),
            end=ends.get(attempt),
            decision=decisions.get(attempt),
        )
        for attempt in attempts
    ]


def choose(told: list[Told], attempt: int | None, directory: Path) -> Told | None:
    """Return attempt `attempt`; without one the last that ended, else the last. None if there is none.

    Raises UsageError if there is no attempt of that number.
    """
    if attempt is not None:
        found = next((one for one in told if one.attempt == attempt), None)
        if found is None:
            raise UsageError(
                f"{directory}: expected an attempt {attempt}, found {len(told)} of them",
                hint="`unbroken why` without --attempt lists them",
            )
        return found
    ended = [one for one in told if not one.is_running]
    return ended[-1] if ended else (told[-1] if told else None)


def _from_journal(
    directory: Path,
) -> tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]], dict[int, dict[str, Any]]]:
    """Return the events of start and end of each attempt, and what was decided after it."""
    starts: dict[int, dict[str, Any]] = {}
    ends: dict[int, dict[str, Any]] = {}
    decisions: dict[int, dict[str, Any]] = {}
    last: int | None = None
    for event in read_events(directory / layout.JOURNAL_FILE):
        attempt = event.get("attempt")
        if event["kind"] == "attempt-started" and isinstance(attempt, int):
            starts[attempt] = event
        elif event["kind"] == "attempt-ended" and isinstance(attempt, int):
            ends[attempt], last = event, attempt
        elif event["kind"] in ("decision", "run-ended") and last is not None:
            names = ("action", "reason", "hint", "next_start", "exit_code")
            decisions[last] = {name: event.get(name) for name in names}
    return starts, ends, decisions


def _told(
    place: Path,
    attempt: int,
    *,
    is_running: bool,
    start: dict[str, Any] | None,
    end: dict[str, Any] | None,
    decision: dict[str, Any] | None,
) -> Told:
    beat = read_heartbeat(place / layout.HEARTBEAT)
    verdict = None if is_running else _verdict(place, end)
    step = number(end.get("step")) if end is not None else None
    if step is None and beat is not None:
        step = beat.step
    return Told(
        attempt=attempt,
        is_running=is_running,
        verdict=verdict,
        started=number(start.get("time")) if start is not None else None,
        ended=number(end.get("ended")) if end is not None else None,
        lived_seconds=number(end.get("lived_seconds")) if end is not None else None,
        step=int(step) if step is not None else None,
        decision=decision,
    )


def _is_running(directory: Path, state: Snapshot | None, attempt: int, *, newest: int) -> bool:
    if state is not None and state.attempt == attempt and state.leader is not None:
        return is_alive(state.leader) is not False
    if attempt != newest:
        return False
    # Without a supervisor: whoever writes checkpoints here.
    with suppress(StorageError):
        holder = ProcessIdentity.from_json(read_json(directory / layout.WRITER_FILE) or {})
        return holder is not None and is_alive(holder) is not False
    return False


def _verdict(place: Path, end: dict[str, Any] | None) -> Verdict:
    with suppress(StorageError):
        written = Verdict.from_json(read_json(place / layout.VERDICT_FILE) or {})
        if written is not None:
            return written
    record = end.get("record") if end is not None else None
    if isinstance(record, dict) and isinstance(record.get("verdict"), dict):
        # The disk was full when the file was to be written, but not for the journal.
        noted = Verdict.from_json(record["verdict"])
        if noted is not None:
            return noted
    # Nobody watched it: its own last words are all there is.
    return judge(None, read_last_words(place), Facts())
