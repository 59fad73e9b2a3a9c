"""What came from outside of a run, in words for people: notices, the end of a job, a grace too short."""

from __future__ import annotations

import time
from typing import Any

from unbroken.cli import output


def words(event: dict[str, Any]) -> str | None:
    """Return an event of the journal in words, or None if it is of another kind."""
    match event["kind"]:
        case "job-end-known":
            return f"job {event['job']} ends at {_clock(event['ends'])}, and the run stops in time"
        case "job-end-unknown":
            return f"when job {event['job']} ends is not known: {event['reason']}"
        case "notice-withdrawn":
            return f"{event['provider']}: withdrawn: {event['what']}"
        case "notice":
            when = f", at {_clock(event['at'])}" if event["at"] is not None else ""
            what = "" if event["is_end"] else "; a checkpoint is asked for, and training goes on"
            return f"{event['provider']}: {event['what']}{when}{what}"
        case "preemption":
            left = output.duration(event["seconds_left"])
            is_cut = "" if event["can_save"] else ", less than the last save took: none is begun"
            return f"{event['who']}: {event['what']}; {left} to save and stop{is_cut}"
        case "notices-not-seen":
            return f"preemption notices are not seen: {event['reason']}"
        case "grace-too-short":
            took, grace = event["save_seconds"], event["grace_seconds"]
            return f"the last save took {took:.1f} s, a stop leaves {grace:g} s (hint: {event['hint']})"
        case "requeued":
            count = event["restart_count"]
            before = f", as {'once' if count == 1 else f'{count} times'} before" if count else ""
            return f"job {event['job']} goes back into the queue{before}"
        case "not-requeued":
            return f"job {event['job']} does not go back into the queue: {event['reason']}"
        case _:
            return None


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
