"""What happened to a run, in plain words and in order, read from what it and its supervisor left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unbroken.rundir import layout
from unbroken.rundir.files import read_json
from unbroken.rundir.journal import number, read_events


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Something that happened at `time` (seconds since 1970), with what it rests on or leads to."""

    time: float
    text: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """The run as a whole: what happened, the verdict on each attempt, the number of each step done."""

    moments: tuple[Moment, ...]
    verdicts: tuple[dict[str, Any], ...]
    steps: tuple[int, ...]
    resumed_at: tuple[int, ...]
    final_value: float | None
    state: str
    exit_code: int | None

    @property
    def steps_done_again(self) -> int:
        return len(self.steps) - len(set(self.steps))


def read_story(directory: Path, notes: list[Moment]) -> Story:
    """Return the story of the run in `directory`; `notes` are what was done to it. Raises StorageError."""
    attempts = layout.attempts(directory)
    steps: list[int] = []
    resumed_at: list[int] = []
    moments = [*notes, *_of_supervisor(directory)]
    value: float | None = None
    for attempt in attempts:
        for event in read_events(layout.attempt_directory(directory, attempt) / layout.events_file()):
            if event["kind"] == "began":
                resumed_at.append(event["step"])
                moments.append(_began(attempt, event))
            elif event["kind"] == "step":
                steps.append(event["step"])
                value = number(event["metrics"]["value"])
    state = read_json(directory / layout.SUPERVISOR_FILE) or {}
    return Story(
        moments=tuple(sorted(moments, key=lambda moment: moment.time)),
        verdicts=tuple(_verdict(directory, attempt) for attempt in attempts),
        steps=tuple(steps),
        resumed_at=tuple(resumed_at),
        final_value=value,
        state=str(state.get("state", "")),
        exit_code=state.get("exit_code"),
    )


def _verdict(directory: Path, attempt: int) -> dict[str, Any]:
    return read_json(layout.attempt_directory(directory, attempt) / layout.VERDICT_FILE) or {}


def _began(attempt: int, event: dict[str, Any]) -> Moment:
    if event["checkpoint"] is None:
        return Moment(time=event["time"], text=f"attempt {attempt} begins with step 1")
    text = f"attempt {attempt} goes on from {event['checkpoint']}, after step {event['step']}"
    return Moment(time=event["time"], text=text)


def _of_supervisor(directory: Path) -> Iterator[Moment]:
    for event in read_events(directory / layout.JOURNAL_FILE):
        try:
            text, *details = _WORDS.get(event["kind"], _other)(event)
        except KeyError:
            # Of another release, which says less.
            text, *details = _other(event)
        yield Moment(time=event["time"], text=text, details=tuple(details))


def _attempt_ended(event: dict[str, Any]) -> list[str]:
    where = f" after step {event['step']}" if event["step"] is not None else ""
    text = f"attempt {event['attempt']} ended{where}: {event['outcome']} ({event['confidence']})"
    return [text, *event["evidence"]]


def _silent(event: dict[str, Any]) -> list[str]:
    return [
        f"no progress for {event['silent_seconds']} s in phase {event['phase']}, after step {event['step']}; "
        f"the limit is {event['limit_seconds']} s"
    ]


def _other(event: dict[str, Any]) -> list[str]:
    """Say what there is to say of any other event: its kind, and its fields that are text."""
    known = ("kind", "time", "attempt")
    texts = [value for name, value in event.items() if name not in known and isinstance(value, str) and value]
    return [event["kind"].replace("-", " "), *texts]


_WORDS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "run-started": lambda event: ["the supervisor started"],
    "attempt-started": lambda event: [f"attempt {event['attempt']} started, process {event['process_id']}"],
    "leader-ended": lambda event: [f"the first process of attempt {event['attempt']} has ended"],
    "attempt-ended": _attempt_ended,
    "decision": lambda event: [f"decision: {event['action']}", event["reason"]],
    "stop-requested": lambda event: ["asked to save and stop", event["reason"]],
    "slow": _silent,
    "hang-suspected": lambda event: [*_silent(event), "where its threads are is written to stacks/"],
    "notices-watched": lambda event: [f"the notices of {event['provider']} are watched"],
    "notice": lambda event: [f"notice of {event['provider']}: {event['what']}"],
    "preemption": lambda event: [
        f"{event['seconds_left']:.0f} seconds are left; the last save took {event['save_seconds']:.2f}"
    ],
    "run-revived": lambda event: ["another supervisor takes over", *_other(event)[1:]],
    "run-ended": lambda event: [f"the run ended: {event['state']}", event["reason"]],
}
