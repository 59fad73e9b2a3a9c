"""What was seen beside the end of an attempt: workers ended for memory, devices, leftovers. Pure."""

from __future__ import annotations

from dataclasses import replace

from unbroken.supervisor.judging.causes import (
    DEVICE_HINT,
    HOST_MEMORY_HINT,
    is_of_device,
    may_tell_of_a_death,
    tells_of_a_death,
)
from unbroken.supervisor.judging.kills import OUT_OF_MEMORY, counted, named_kills, no_kill
from unbroken.supervisor.judging.verdict import DeviceError, Facts, Verdict


def beside(verdict: Verdict, facts: Facts) -> Verdict:
    """Return `verdict` with all that was seen besides, and corrected by it where that explains more."""
    verdict = _with_device(_with_workers(verdict, facts), facts)
    holders = facts.device_holders if verdict.cause == "device-memory" else ()
    by_us = f"ended by its supervisor: {facts.ended_because}"
    is_silent = facts.ended_because is not None and by_us not in verdict.evidence
    return verdict.with_evidence(
        *([by_us] if is_silent else []),
        *(f"the kernel's log: {error.line}" for error in facts.device_errors),
        *(f"memory of a device is held by {holder}" for holder in holders),
        *([f"left after its leader, and ended: {', '.join(facts.leftovers)}"] if facts.leftovers else []),
    )


def _with_device(verdict: Verdict, facts: Facts) -> Verdict:
    if verdict.cause or not any(_explains(error, verdict, facts) for error in facts.device_errors):
        return verdict
    return replace(verdict, cause="device", hint=DEVICE_HINT)


def _explains(error: DeviceError, verdict: Verdict, facts: Facts) -> bool:
    """Tell whether it was behind the end: the device may be another one's, the log is the machine's."""
    if not error.is_of_hardware:
        return False
    if verdict.outcome == "failed":
        return is_of_device(verdict.message)
    if error.process_id is None:
        return verdict.outcome in ("hung", "signalled")
    return error.process_id in facts.processes and verdict.outcome in (
        "hung",
        "killed",
        "signalled",
        "vanished",
    )


def _with_workers(verdict: Verdict, facts: Facts) -> Verdict:
    count, is_its_own = counted(facts)
    if verdict.kind == OUT_OF_MEMORY:
        return verdict
    is_of_a_death = tells_of_a_death(verdict.message)
    if not count:
        # What looks like a kill for memory is not always one.
        return verdict.with_evidence(no_kill(facts)) if is_of_a_death else verdict
    if not _is_explained_by_it(verdict, is_of_a_death=is_of_a_death, is_its_own=is_its_own):
        return verdict.with_evidence(
            f"meanwhile the kernel ended {named_kills(facts)} for want of memory, perhaps its child"
        )
    return replace(
        verdict,
        # An exit code of 0 was that of a shell, or of a program that does not look after its workers.
        outcome="failed" if verdict.outcome == "completed" else verdict.outcome,
        confidence="certain" if is_its_own and is_of_a_death else "likely",
        evidence=(f"out of memory: the kernel ended {named_kills(facts)} for that", *verdict.evidence),
        kind=OUT_OF_MEMORY,
        cause="memory",
        hint=HOST_MEMORY_HINT,
    )


def _is_explained_by_it(verdict: Verdict, *, is_of_a_death: bool, is_its_own: bool) -> bool:
    if verdict.outcome == "completed":
        # Its own word stands against a kill that may have been of no matter.
        return is_its_own and verdict.confidence != "certain"
    # A pool waits for ever for a worker that the kernel has ended.
    if verdict.outcome in ("vanished", "lost", "hung"):
        return is_its_own and not verdict.cause
    if verdict.outcome != "failed":
        return False
    is_riddle = (
        verdict.confidence == "unknown"
        or verdict.cause in ("collective", "network")
        or may_tell_of_a_death(verdict.kind, verdict.message)
    )
    return is_of_a_death or (is_its_own and is_riddle)
