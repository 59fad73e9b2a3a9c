"""Attempts that ended by a signal: who sent it, as far as counters and logs tell. Pure."""

from __future__ import annotations

import signal

from unbroken.supervisor.judging.causes import HOST_MEMORY_HINT, SHARED_MEMORY_HINT
from unbroken.supervisor.judging.verdict import ExitStatus, Facts, SharedMemory, Verdict

OUT_OF_MEMORY = "out-of-memory"
_SMALL_BYTES = 1 << 30
_FULL_SHARE = 0.1


def by_signal(status: ExitStatus, facts: Facts) -> Verdict:
    """Return the verdict on an attempt whose leader, or whose rank, was ended by the signal in `status`."""
    if status.signal_number == signal.SIGKILL:
        return _killed(status, facts)
    kind = status.signal_name
    if facts.is_stop_asked and status.signal_number == signal.SIGTERM:
        evidence = (str(status), "it was asked to stop, and said nothing about saving")
        return Verdict(outcome="stopped", confidence="certain", evidence=evidence, kind=kind)
    if facts.killer:
        return by_other_killer(str(status), facts)
    plain = Verdict(outcome="signalled", confidence="certain", evidence=(str(status),), kind=kind)
    if status.signal_number == signal.SIGBUS and facts.shared_memory is not None:
        return _bus_error(plain, facts.shared_memory)
    return plain


def counted(facts: Facts) -> tuple[int, bool]:
    """Return how many of the attempt the kernel ended for memory, and whether they were surely its own."""
    kills = facts.oom_kills
    if kills.attempt is not None or facts.victims:
        return max(kills.attempt or 0, len(facts.victims)), True
    return kills.own_group or 0, False


def named_kills(facts: Facts) -> str:
    """Return in words whom the kernel ended for want of memory."""
    if facts.victims:
        return ", ".join(str(victim) for victim in facts.victims)
    count, is_its_own = counted(facts)
    return f"{count} of its {'processes' if is_its_own else 'memory group'}"


def _killed(status: ExitStatus, facts: Facts) -> Verdict:
    if facts.ended_because is not None:
        evidence = (f"ended by its supervisor: {facts.ended_because}",)
        return Verdict(outcome="killed", confidence="certain", evidence=evidence, kind="by-supervisor")
    if counted(facts)[0]:
        # Another of its processes may be the one that ran out of memory, and somebody have sent this.
        ended = facts.processes if status.is_from_shell else {facts.leader}
        is_victim = any(victim.process_id in ended for victim in facts.victims)
        return Verdict(
            outcome="killed",
            confidence="certain" if is_victim else "likely",
            evidence=(str(status), f"out of memory: the kernel ended {named_kills(facts)} for that"),
            kind=OUT_OF_MEMORY,
            cause="memory",
            hint=HOST_MEMORY_HINT,
        )
    if facts.killer:
        return by_other_killer(str(status), facts)
    plain = Verdict(outcome="killed", confidence="unknown", evidence=(str(status),), kind="SIGKILL")
    seen = no_kill(facts)
    return plain.with_evidence(f"{seen}; someone sent it" if seen.startswith("not ") else seen)


def no_kill(facts: Facts) -> str:
    """Return in words what the counters say where none of the attempt's own has moved."""
    kills = facts.oom_kills
    # Every kill for memory counts in the machine's, those of a group too: no count excludes them all.
    if kills.machine == 0:
        return "not out of memory: the kernel ended no process for that"
    if kills.attempt == 0:
        return "not out of memory: the kernel ended none of its processes for that"
    if kills.machine:
        return f"perhaps out of memory: the kernel ended {kills.machine} of this machine's processes for that"
    return "whether memory ran out cannot be read here"


def by_other_killer(ended: str, facts: Facts) -> Verdict:
    """Return the verdict on what a program ended that looks after memory; `ended` is how that was seen."""
    return Verdict(
        outcome="killed",
        confidence="likely",
        evidence=(ended, f"out of memory, in the judgement of another program: {facts.killer}"),
        kind=OUT_OF_MEMORY,
        cause="memory",
        hint=HOST_MEMORY_HINT,
    )


def _bus_error(plain: Verdict, shared: SharedMemory) -> Verdict:
    seen = plain.with_evidence(str(shared))
    is_full = shared.free_bytes < shared.total_bytes * _FULL_SHARE
    # What its dead owner held is free again by now: of a small one a guess remains.
    if not is_full and shared.total_bytes >= _SMALL_BYTES:
        return seen
    return Verdict(
        outcome=plain.outcome,
        confidence="likely",
        evidence=(*seen.evidence, "perhaps it was full: a write to memory without room behind it ends so"),
        kind=plain.kind,
        cause="shared-memory",
        hint=SHARED_MEMORY_HINT,
    )
