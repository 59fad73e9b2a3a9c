"""Why an attempt ended: a pure judgement from exit status, last words and facts.

What the run said about itself outweighs the exit status: pipes, shells and launchers replace exit
codes, and nobody but the run writes its last words.
"""

from __future__ import annotations

import errno
import signal
from collections.abc import Callable

from unbroken.errors import EXIT_DO_NOT_RESTART, EXIT_OK, EXIT_RUN_ME_AGAIN, EXIT_USAGE
from unbroken.rundir.last_words import LastWords
from unbroken.supervisor.verdict import ExitStatus, Facts, SeenException, Verdict

# 93 is what NVIDIA's resiliency launcher says for "do not requeue".
_DO_NOT_RESTART = (EXIT_DO_NOT_RESTART, 93)
_AFTER_STOP = (EXIT_OK, EXIT_RUN_ME_AGAIN)
_NOT_EXECUTABLE = 126
_NOT_FOUND = 127


def judge(status: ExitStatus | None, words: LastWords | None, facts: Facts) -> Verdict:
    """Return the verdict; `status` is None if the leader is among the survivors."""
    if facts.survivors:
        return _unkillable(facts)
    assert status is not None, "a leader that ended has a status"
    if words is None or words.ending == "running":
        verdict = _by_status(status, words, facts)
    else:
        verdict = _by_words(words, status, facts).with_evidence(*_exit_beside(words, status))
    return verdict.with_evidence(*_memory_beside(status, facts), *_leftovers_beside(facts))


def not_started(command: str, error: OSError) -> Verdict:
    """Return the verdict on an attempt whose command could not be started."""
    has_no_room = error.errno in (errno.EAGAIN, errno.ENOMEM)
    return Verdict(
        # No room for another process may pass; a wrong command does not.
        outcome="failed" if has_no_room else "not-started",
        confidence="certain",
        evidence=(f"{command} could not be started: {error.strerror}",),
        kind=type(error).__name__,
        message=str(error.strerror),
        hint="check the command, its rights and its first line",
    )


def _unkillable(facts: Facts) -> Verdict:
    return Verdict(
        outcome="unkillable",
        confidence="certain",
        evidence=tuple(f"{survivor} does not end, not even by SIGKILL" for survivor in facts.survivors),
        hint="a process in state D waits for a device or a file system; look at those first",
    )


def _by_words(words: LastWords, status: ExitStatus, facts: Facts) -> Verdict:
    if words.ending == "completed":
        return _completed(words, status, facts)
    if words.ending == "stopped":
        evidence = f"the run said that its state is saved, at step {words.step}"
        return Verdict(
            outcome="stopped",
            confidence="certain",
            evidence=(f"{evidence} ({words.reason})" if words.reason else evidence,),
            message=words.reason,
            is_saved=True,
        )
    is_refused = words.exit_code in _DO_NOT_RESTART or words.kind == "usage"
    said = SeenException(kind=words.kind, message=words.message, frame=words.frame)
    return Verdict(
        outcome="refused" if is_refused else "failed",
        confidence="certain",
        evidence=(f"the run said, at step {words.step}: {said}",),
        kind=words.kind,
        message=words.message,
        frame=words.frame,
        hint=words.hint,
    )


def _completed(words: LastWords, status: ExitStatus, facts: Facts) -> Verdict:
    said = f"the run said that it completed, at step {words.step}"
    # A signal is how a teardown goes wrong and takes nothing from the training; an exit code of its own
    # is the script's word that what came after the training, such as an export, has failed.
    if not status.code:
        return Verdict(outcome="completed", confidence="certain", evidence=(said,))
    exited = f"training completed; the script then exited with code {status.code}"
    seen = (f"the last exception in the output: {facts.seen_exception}",) if facts.seen_exception else ()
    return Verdict(
        outcome="completed",
        confidence="certain",
        evidence=(exited, said, *seen),
        exit_code=status.code,
    )


def _by_status(status: ExitStatus, words: LastWords | None, facts: Facts) -> Verdict:
    if status.signal_number == signal.SIGKILL:
        return _killed(status, facts)
    if status.signal_number is not None:
        return _signalled(status, facts)
    assert status.code is not None, "neither a code nor a signal"
    return _BY_CODE.get(status.code, _failed)(status, words, facts)


def _zero(_: ExitStatus, words: LastWords | None, facts: Facts) -> Verdict:
    if words is not None:
        return Verdict(
            outcome="vanished",
            confidence="certain",
            evidence=("exit code 0, but the run never said that it completed",),
        )
    no_words = "exit code 0 is all there is to go by: the command left no last words"
    if facts.is_stop_asked:
        evidence = ("it ended in order after it was asked to stop", no_words)
        return Verdict(outcome="stopped", confidence="likely", evidence=evidence, is_saved=True)
    return Verdict(outcome="completed", confidence="likely", evidence=(no_words,))


def _saved(status: ExitStatus, _: LastWords | None, __: Facts) -> Verdict:
    return Verdict(
        outcome="stopped",
        confidence="likely",
        evidence=(f"{status}: state saved, run me again",),
        is_saved=True,
    )


def _refused(status: ExitStatus, _: LastWords | None, __: Facts) -> Verdict:
    return Verdict(
        outcome="refused",
        confidence="certain",
        evidence=(f"{status}: do not restart",),
        kind=f"exit-{status.code}",
        hint="see the end of the output for the reason",
    )


def _missing(status: ExitStatus, words: LastWords | None, facts: Facts) -> Verdict:
    if words is not None:
        return _failed(status, words, facts)
    what = "was not found" if status.code == _NOT_FOUND else "could not be executed"
    return Verdict(
        outcome="not-started",
        confidence="likely",
        evidence=(f"{status}, a shell's way to say that a command {what}",),
        kind=f"exit-{status.code}",
        hint="see the end of the output for its name",
    )


def _misused(status: ExitStatus, words: LastWords | None, facts: Facts) -> Verdict:
    if words is not None or facts.made_step or facts.seen_exception is not None:
        return _failed(status, words, facts)
    return Verdict(
        outcome="refused",
        confidence="likely",
        evidence=(f"{status}, the usual one for wrong arguments or a missing script",),
        kind=f"exit-{status.code}",
        hint="see the end of the output for what it did not like",
    )


def _failed(status: ExitStatus, _: LastWords | None, facts: Facts) -> Verdict:
    seen = facts.seen_exception
    if seen is None:
        kind = f"exit-{status.code}"
        return Verdict(outcome="failed", confidence="unknown", evidence=(str(status),), kind=kind)
    return Verdict(
        outcome="failed",
        confidence="likely",
        evidence=(str(status), f"the last exception in the output: {seen}"),
        kind=seen.kind,
        message=seen.message,
        frame=seen.frame,
        hint=seen.hint,
    )


_BY_CODE: dict[int, Callable[[ExitStatus, LastWords | None, Facts], Verdict]] = {
    EXIT_OK: _zero,
    EXIT_USAGE: _misused,
    EXIT_RUN_ME_AGAIN: _saved,
    **dict.fromkeys(_DO_NOT_RESTART, _refused),
    **dict.fromkeys((_NOT_EXECUTABLE, _NOT_FOUND), _missing),
}


def _signalled(status: ExitStatus, facts: Facts) -> Verdict:
    kind = status.signal_name
    if facts.is_stop_asked and status.signal_number == signal.SIGTERM:
        evidence = (str(status), "it was asked to stop, and said nothing about saving")
        return Verdict(outcome="stopped", confidence="certain", evidence=evidence, kind=kind)
    return Verdict(outcome="signalled", confidence="certain", evidence=(str(status),), kind=kind)


def _killed(status: ExitStatus, facts: Facts) -> Verdict:
    if facts.ended_because is not None:
        evidence = (f"ended by its supervisor: {facts.ended_because}",)
        return Verdict(outcome="killed", confidence="certain", evidence=evidence, kind="by-supervisor")
    kills = facts.oom_kills
    if kills.own_group:
        counted = f"out of memory: the kernel ended {kills.own_group} of its memory group for that"
        return Verdict(
            outcome="killed", confidence="likely", evidence=(str(status), counted), kind="out-of-memory"
        )
    plain = Verdict(outcome="killed", confidence="unknown", evidence=(str(status),), kind="SIGKILL")
    if kills.machine == 0:
        # Every kill for memory counts there, those of a group too: no count excludes them all.
        return plain.with_evidence("not out of memory: the kernel ended no process for that; someone sent it")
    if kills.machine:
        return plain.with_evidence(
            f"perhaps out of memory: the kernel ended {kills.machine} of this machine's processes for that"
        )
    return plain.with_evidence("whether memory ran out cannot be read here")


def _exit_beside(words: LastWords, status: ExitStatus) -> list[str]:
    if words.ending == "failed":
        # A failure that ends with 0 was hidden by a pipe, a shell or a handler.
        return [] if status.code not in (EXIT_OK, None) else [f"its process: {status}"]
    # The code of a script that completed is said already.
    is_said = status.code is not None if words.ending == "completed" else status.code in _AFTER_STOP
    return [] if is_said else [f"its process, afterwards: {status}"]


def _memory_beside(status: ExitStatus, facts: Facts) -> list[str]:
    kills = facts.oom_kills.own_group
    if not kills or status.signal_number == signal.SIGKILL:
        return []
    return [f"meanwhile the kernel ended {kills} of its memory group for want of memory, perhaps its child"]


def _leftovers_beside(facts: Facts) -> list[str]:
    if not facts.leftovers:
        return []
    return [f"left after its leader, and ended: {', '.join(facts.leftovers)}"]
