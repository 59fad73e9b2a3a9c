"""Why an attempt ended: a pure judgement from exit status, last words and facts.

What the run said about itself outweighs the exit status: pipes, shells and launchers replace exit
codes, and nobody but the run writes its last words. Where it said nothing, counters of the kernel
and the output are asked.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace

from unbroken.errors import EXIT_DO_NOT_RESTART, EXIT_OK, EXIT_RUN_ME_AGAIN, EXIT_USAGE, StorageError
from unbroken.rundir.last_words import ROLL_BACK, LastWords
from unbroken.supervisor.judging.beside import beside
from unbroken.supervisor.judging.causes import cause_of, explained, hint_of, may_tell_of_a_death
from unbroken.supervisor.judging.kills import by_other_killer, by_signal
from unbroken.supervisor.judging.verdict import ExitStatus, Facts, SeenException, Verdict

# 93 is what NVIDIA's resiliency launcher says for "do not requeue".
_DO_NOT_RESTART = (EXIT_DO_NOT_RESTART, 93)
_AFTER_STOP = (EXIT_OK, EXIT_RUN_ME_AGAIN)
_NOT_EXECUTABLE = 126
_NOT_FOUND = 127
_BY_LAUNCHER = ExitStatus(code=1)
# Too many processes, or open files: as with memory, somebody may give some back.
_NO_ROOM = (errno.EAGAIN, errno.EMFILE, errno.ENFILE)


def judge(status: ExitStatus | None, words: LastWords | None, facts: Facts) -> Verdict:
    """Return the verdict; `status` is None if nobody saw the leader end, or it did not."""
    if facts.survivors:
        return _unkillable(facts)
    said = None if words is None or words.ending == "running" else words
    if said is not None and not _is_of_another(said, status, facts):
        verdict = _by_words(said, status, facts).with_evidence(*_exit_beside(said, status))
    elif facts.ended_because is not None and facts.ended_kind == "hang":
        verdict = _hung(facts.ended_because)
    elif status is None:
        verdict = _lost(facts)
    else:
        verdict = _by_status(status, words, facts)
        if said is not None and said.ending == "failed":
            verdict = verdict.with_evidence(*_by_words(said, status, facts).evidence)
        elif said is not None:
            verdict = replace(verdict, is_saved=True)
    return _preempted(beside(explained(verdict), facts), facts)


def not_started(command: str, error: OSError) -> Verdict:
    """Return the verdict on an attempt whose command could not be started."""
    failed = Verdict(
        outcome="failed",
        confidence="certain",
        evidence=(f"{command} could not be started: {error.strerror}",),
        kind=type(error).__name__,
        cause="memory" if error.errno in _NO_ROOM else cause_of("", f"[Errno {error.errno}]"),
        message=str(error.strerror),
    )
    if failed.cause:
        # What ran out or failed there may pass; a wrong command does not.
        return replace(failed, hint=hint_of(failed.cause))
    return replace(failed, outcome="not-started", hint="check the command, its rights and its first line")


def not_made(error: StorageError) -> Verdict:
    """Return the verdict on an attempt that got no directory; without a cause a restart cannot help."""
    return Verdict(
        outcome="failed",
        confidence="certain",
        evidence=(f"no attempt can be made: {error.message}",),
        kind=error.kind,
        cause=cause_of(error.kind, error.message),
        message=error.message,
        hint=error.hint,
    )


def _unkillable(facts: Facts) -> Verdict:
    return Verdict(
        outcome="unkillable",
        confidence="certain",
        evidence=tuple(f"{survivor} does not end, not even by SIGKILL" for survivor in facts.survivors),
        hint="a process in state D waits for a device or a file system; look at those first",
    )


def _is_of_another(said: LastWords, status: ExitStatus | None, facts: Facts) -> bool:
    """Tell whether a rank only stopped in order, or lost its connection, since another one had failed."""
    if facts.rank_failure is None or facts.is_stop_asked:
        return False
    if said.ending == "failed":
        is_of_connection = cause_of(said.kind, said.message) in ("collective", "network")
        is_by_signal = facts.rank_failure.status.signal_number is not None
        is_follow_on = is_of_connection or may_tell_of_a_death(said.kind, said.message)
        return status == _BY_LAUNCHER and is_by_signal and is_follow_on
    return said.ending == "stopped"


def _hung(because: str) -> Verdict:
    return Verdict(
        outcome="hung",
        confidence="certain",
        evidence=(f"ended by its supervisor: {because}",),
        kind="hang",
        hint="the stacks in the attempt's folder show where it waited",
    )


def _lost(facts: Facts) -> Verdict:
    if facts.machine_restarted:
        restarted = "this machine was started again meanwhile"
        return Verdict(outcome="lost", confidence="certain", evidence=(restarted,), cause="reboot")
    unseen = "it ended while no supervisor was there: its exit status is unknown"
    if facts.killer:
        return by_other_killer(unseen, facts)
    return Verdict(outcome="lost", confidence="unknown", evidence=(unseen,))


def _preempted(verdict: Verdict, facts: Facts) -> Verdict:
    if not facts.is_preempted or verdict.outcome in ("completed", "refused", "unkillable", "not-started"):
        return verdict
    taken = "it was to stop since its machine is taken away"
    return replace(verdict, cause="preemption").with_evidence(taken)


def _by_words(words: LastWords, status: ExitStatus | None, facts: Facts) -> Verdict:
    if words.ending == "completed":
        return _completed(words, status, facts)
    if words.ending == "stopped" and words.kind == ROLL_BACK:
        return _rolled_back(words)
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


def _rolled_back(words: LastWords) -> Verdict:
    return Verdict(
        outcome="stopped",
        confidence="certain",
        evidence=(f"the run said that it goes on from an earlier checkpoint: {words.reason}",),
        kind=ROLL_BACK,
        message=words.reason,
        hint=words.hint,
        is_saved=True,
    )


def _completed(words: LastWords, status: ExitStatus | None, facts: Facts) -> Verdict:
    said = f"the run said that it completed, at step {words.step}"
    # A signal is how a teardown goes wrong and takes nothing from the training; an exit code of its own
    # is the script's word that what came after the training, such as an export, has failed.
    if status is None or not status.code:
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
    rank = facts.rank_failure
    if rank is not None and status == _BY_LAUNCHER:
        of_rank = replace(facts, leader=rank.process_id)
        return _by_own_status(rank.status, words, of_rank).with_evidence(str(rank))
    return _by_own_status(status, words, facts)


def _by_own_status(status: ExitStatus, words: LastWords | None, facts: Facts) -> Verdict:
    if status.signal_number is not None:
        return by_signal(status, facts)
    assert status.code is not None, "neither a code nor a signal"
    return _BY_CODE.get(status.code, _failed)(status, words, facts)


def _zero(status: ExitStatus, words: LastWords | None, facts: Facts) -> Verdict:
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
    if facts.is_code_hidden and facts.seen_exception is not None and facts.seen_exception.is_last:
        hidden = "the code is a shell's, which does not tell that of a command in a pipe"
        return _failed(status, words, facts).with_evidence(hidden)
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


def _exit_beside(words: LastWords, status: ExitStatus | None) -> list[str]:
    if status is None:
        return ["how its process ended, afterwards, is unknown"]
    if words.ending == "failed":
        # A failure that ends with 0 was hidden by a pipe, a shell or a handler.
        return [] if status.code not in (EXIT_OK, None) else [f"its process: {status}"]
    # The code of a script that completed is said already.
    is_said = status.code is not None if words.ending == "completed" else status.code in _AFTER_STOP
    return [] if is_said else [f"its process, afterwards: {status}"]
