"""The attempts of a run so far, read back from its journal: a new supervisor must not forget failures.

A start by the user begins a new history; a supervisor that takes over goes on with it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from unbroken.rundir import layout
from unbroken.rundir.journal import number, read_events
from unbroken.supervisor.judging.verdict import OomKills, Verdict
from unbroken.supervisor.restart_policy import Decision, Ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """An attempt that started, and what there was before it did. `started` is in seconds since 1970.

    `wait_status` is how its leader ended, in the form of wait(2), if that has been seen. If the supervisor
    was about to end it, `ended_because` says why, and `ended_kind` of which kind that is.
    """

    attempt: int
    started: float
    listed: str | None = None
    oom_kills: OomKills = field(default_factory=OomKills)
    wait_status: int | None = None
    ended_because: str = ""
    ended_kind: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What the journal tells since the user last started the run. Times are in seconds since 1970.

    `begun` is the last attempt if its end is in no record, `last_attempt` the last whose end is in one.
    `decision` is what was to follow, at `next_start`; both are None if that was not decided. `ended_as` is
    the state in which the run ended at `ended_at`, for `reason` and with `exit_code`; it `is_interrupted` if
    it ended only since the machine was about to go away.
    """

    first_checkpoint: str | None = None
    ended: tuple[Ended, ...] = ()
    begun: Begun | None = None
    last_attempt: int = 0
    decision: Decision | None = None
    next_start: float | None = None
    ended_at: float = 0.0
    ended_as: str | None = None
    reason: str = ""
    exit_code: int | None = None
    is_interrupted: bool = False


def read_past(directory: Path) -> Past:
    """Return what the journal of the run in `directory` tells. Raises StorageError if it cannot be read."""
    return past_of(read_events(directory / layout.JOURNAL_FILE))


def past_of(events: Iterable[dict[str, Any]]) -> Past:
    """Return what `events`, oldest first, tell."""
    past = Past()
    for event in events:
        past = _after(past, event)
    return past


def ended_to_json(ended: Ended) -> dict[str, Any]:
    """Return what `ended_from_json` needs; its start is by the clock on the wall, which outlives a boot."""
    value = asdict(ended)
    value["started"] = time.time() - (time.monotonic() - value.pop("started_seconds"))
    return value


def ended_from_json(value: object) -> Ended | None:
    """Return the attempt that is written in `value`, or None if it is not readable as one."""
    if not isinstance(value, dict) or not isinstance(value.get("verdict"), dict):
        return None
    verdict = Verdict.from_json(value["verdict"])
    if verdict is None:
        return None
    try:
        # It may be negative: the clock that never goes back began at the last boot.
        started = time.monotonic() - (time.time() - float(value["started"]))
        return Ended(**{**_known(Ended, value), "verdict": verdict, "started_seconds": started})
    except (KeyError, TypeError, ValueError):
        return None


def _after(past: Past, event: dict[str, Any]) -> Past:
    match event["kind"]:
        case "run-started":
            return Past(
                first_checkpoint=_text(event.get("first_checkpoint")),
                last_attempt=past.begun.attempt if past.begun is not None else past.last_attempt,
            )
        case "attempt-started":
            return replace(past, begun=_begun(event), decision=None, next_start=None)
        case "leader-ended" if past.begun is not None and isinstance(event.get("wait_status"), int):
            return replace(past, begun=replace(past.begun, wait_status=event["wait_status"]))
        case "attempt-ending" if past.begun is not None:
            because, kind = str(event.get("because", "")), str(event.get("ended_kind", ""))
            return replace(past, begun=replace(past.begun, ended_because=because, ended_kind=kind))
        case "attempt-ended":
            last_ended = ended_from_json(event.get("record"))
            more = (last_ended,) if last_ended is not None else ()
            last = int(number(event.get("attempt")) or past.last_attempt)
            return replace(past, begun=None, ended=(*past.ended, *more), last_attempt=last)
        case "decision":
            next_start = number(event.get("next_start"))
            decision, ended = _decision(event), _with_decision(past.ended, event)
            return replace(past, ended=ended, decision=decision, next_start=next_start)
        case "run-ended":
            return replace(
                past,
                ended_at=number(event.get("time")) or 0.0,
                ended_as=_text(event.get("state")) or "stopped",
                reason=str(event.get("reason", "")),
                exit_code=event.get("exit_code") if isinstance(event.get("exit_code"), int) else None,
                is_interrupted=event.get("is_interrupted") is True,
            )
        case "run-revived":
            return replace(past, ended_as=None, reason="", exit_code=None, is_interrupted=False)
        case _:
            return past


def _begun(event: dict[str, Any]) -> Begun | None:
    attempt = event.get("attempt")
    if not isinstance(attempt, int):
        return None
    kills = event.get("oom_kills")
    return Begun(
        attempt=attempt,
        started=number(event.get("time")) or time.time(),
        listed=_text(event.get("listed")),
        oom_kills=OomKills(**_known(OomKills, kills)) if isinstance(kills, dict) else OomKills(),
    )


def _known(kind: type, value: dict[str, Any]) -> dict[str, Any]:
    # Fields of another release are passed over: a little history is better than none.
    names = {item.name for item in fields(kind)}
    return {name: item for name, item in value.items() if name in names}


def _with_decision(ended: tuple[Ended, ...], event: dict[str, Any]) -> tuple[Ended, ...]:
    if not ended:
        return ended
    last = replace(ended[-1], checkpoint=_text(event.get("checkpoint")))
    if _text(event.get("back_to")) is not None:
        last = replace(last, went_back=True, rolled_back=True)
    return (*ended[:-1], last)


def _decision(event: dict[str, Any]) -> Decision:
    return Decision(
        action="roll-back" if event.get("action") == "roll-back" else "restart",
        reason=str(event.get("reason", "")),
        hint=str(event.get("hint", "")),
        back_to=_text(event.get("back_to")),
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
