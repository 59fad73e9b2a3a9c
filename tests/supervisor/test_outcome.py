"""Tables for the pure judgement: exit status, last words and facts -> verdict."""

from __future__ import annotations

import errno
import signal

import pytest

from unbroken.rundir.last_words import Ending, LastWords
from unbroken.supervisor.outcome import judge, not_started
from unbroken.supervisor.verdict import ExitStatus, Facts, OomKills, SeenException, Verdict, exit_status

CODE = ExitStatus
BY = {name: ExitStatus(signal_number=number) for name, number in signal.Signals.__members__.items()}
SEEN = SeenException(kind="ValueError", message="bad shape", frame="train.py:3 in step")


def words(ending: Ending, **fields: object) -> LastWords:
    return LastWords(ending=ending, step=7, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "said", "facts", "outcome", "kind"),
    [
        (CODE(code=0), words("completed"), Facts(), "completed", ""),
        (BY["SIGABRT"], words("completed"), Facts(), "completed", ""),
        (CODE(code=1), words("completed"), Facts(), "completed", ""),
        (CODE(code=0), words("completed"), Facts(is_stop_asked=True), "completed", ""),
        (CODE(code=0), None, Facts(), "completed", ""),
        (CODE(code=0), None, Facts(is_stop_asked=True), "stopped", ""),
        (CODE(code=0), words("running"), Facts(), "vanished", ""),
        (CODE(code=0), words("running"), Facts(is_stop_asked=True), "vanished", ""),
        (CODE(code=75), None, Facts(), "stopped", ""),
        (CODE(code=75), words("running"), Facts(), "stopped", ""),
        (CODE(code=0), words("stopped"), Facts(), "stopped", ""),
        (BY["SIGTERM"], words("stopped"), Facts(), "stopped", ""),
        (BY["SIGTERM"], None, Facts(is_stop_asked=True), "stopped", "SIGTERM"),
        (BY["SIGTERM"], None, Facts(), "signalled", "SIGTERM"),
        (BY["SIGSEGV"], words("running"), Facts(), "signalled", "SIGSEGV"),
        (BY["SIGKILL"], None, Facts(), "killed", "SIGKILL"),
        (BY["SIGKILL"], None, Facts(ended_because="too slow"), "killed", "by-supervisor"),
        (CODE(code=1), words("failed", kind="KeyError"), Facts(), "failed", "KeyError"),
        (CODE(code=0), words("failed", kind="KeyError"), Facts(), "failed", "KeyError"),
        (BY["SIGKILL"], words("failed", kind="KeyError"), Facts(), "failed", "KeyError"),
        (CODE(code=1), words("failed", kind="KeyError"), Facts(seen_exception=SEEN), "failed", "KeyError"),
        (CODE(code=1), words("failed", kind="input", exit_code=78), Facts(), "refused", "input"),
        (CODE(code=1), words("failed", kind="usage", exit_code=2), Facts(), "refused", "usage"),
        (CODE(code=78), None, Facts(), "refused", "exit-78"),
        (CODE(code=93), words("running"), Facts(), "refused", "exit-93"),
        (CODE(code=1), None, Facts(), "failed", "exit-1"),
        (CODE(code=1), None, Facts(seen_exception=SEEN), "failed", "ValueError"),
        (CODE(code=0), None, Facts(seen_exception=SEEN), "completed", ""),
        (CODE(code=2), None, Facts(), "refused", "exit-2"),
        (CODE(code=2), None, Facts(made_step=True), "failed", "exit-2"),
        (CODE(code=2), words("running"), Facts(), "failed", "exit-2"),
        (CODE(code=126), None, Facts(), "not-started", "exit-126"),
        (CODE(code=127), None, Facts(), "not-started", "exit-127"),
        (CODE(code=127), words("running"), Facts(), "failed", "exit-127"),
        (None, None, Facts(survivors=("process 7 (python, state D)",)), "unkillable", ""),
        (CODE(code=0), words("completed"), Facts(survivors=("process 7",)), "unkillable", ""),
    ],
)
def test_the_run_is_believed_before_its_exit_status(
    status: ExitStatus | None, said: LastWords | None, facts: Facts, outcome: str, kind: str
) -> None:
    verdict = judge(status, said, facts)
    assert (verdict.outcome, verdict.kind) == (outcome, kind)
    assert verdict.evidence


@pytest.mark.parametrize(
    ("kills", "kind", "confidence", "evidence"),
    [
        (OomKills(machine=1, own_group=1), "out-of-memory", "likely", "out of memory"),
        (OomKills(machine=None, own_group=2), "out-of-memory", "likely", "ended 2 of its memory group"),
        (OomKills(machine=0, own_group=0), "SIGKILL", "unknown", "not out of memory"),
        (OomKills(machine=0), "SIGKILL", "unknown", "not out of memory"),
        (OomKills(machine=3), "SIGKILL", "unknown", "perhaps out of memory"),
        # A group's counter may not see a victim in a group below it: no proof either way.
        (OomKills(machine=3, own_group=0), "SIGKILL", "unknown", "perhaps out of memory"),
        (OomKills(), "SIGKILL", "unknown", "cannot be read"),
    ],
)
def test_want_of_memory_is_claimed_or_excluded_only_by_counters(
    kills: OomKills, kind: str, confidence: str, evidence: str
) -> None:
    verdict = judge(BY["SIGKILL"], words("running"), Facts(oom_kills=kills))
    assert (verdict.outcome, verdict.kind, verdict.confidence) == ("killed", kind, confidence)
    assert evidence in " ".join(verdict.evidence)


def test_a_worker_ended_for_want_of_memory_is_named_beside_the_exception_it_caused() -> None:
    verdict = judge(CODE(code=1), None, Facts(seen_exception=SEEN, oom_kills=OomKills(own_group=1)))
    assert verdict.kind == "ValueError"
    assert "want of memory" in verdict.evidence[-1]


@pytest.mark.parametrize(
    ("wait_status", "expected"),
    [
        (0, ExitStatus(code=0)),
        (3 << 8, ExitStatus(code=3)),
        (9, ExitStatus(signal_number=9)),
        (11 | 0x80, ExitStatus(signal_number=11)),
        (128 << 8, ExitStatus(code=128)),
        (137 << 8, ExitStatus(signal_number=9, is_from_shell=True)),
        (143 << 8, ExitStatus(signal_number=15, is_from_shell=True)),
        (255 << 8, ExitStatus(code=255)),
    ],
)
def test_a_shells_code_for_a_signal_is_taken_for_the_signal(wait_status: int, expected: ExitStatus) -> None:
    assert exit_status(wait_status) == expected


def test_a_shells_code_for_sigkill_is_judged_like_sigkill_and_says_so() -> None:
    verdict = judge(exit_status(137 << 8), None, Facts())
    assert verdict.outcome == "killed"
    assert "exit code 137" in verdict.evidence[0]


def test_only_a_state_that_was_said_to_be_saved_counts_as_saved() -> None:
    asked = Facts(is_stop_asked=True)
    assert judge(BY["SIGTERM"], words("stopped"), asked).is_saved
    assert judge(CODE(code=75), None, asked).is_saved
    assert not judge(BY["SIGTERM"], None, asked).is_saved
    assert not judge(BY["SIGTERM"], words("running"), asked).is_saved


def test_an_abort_after_completion_and_leftovers_are_in_the_evidence() -> None:
    verdict = judge(BY["SIGABRT"], words("completed"), Facts(leftovers=("process 9 (worker, state S)",)))
    assert any("SIGABRT" in line for line in verdict.evidence)
    assert any("process 9" in line for line in verdict.evidence)


def test_a_script_that_fails_after_completion_keeps_its_exit_code_and_its_exception() -> None:
    verdict = judge(CODE(code=3), words("completed"), Facts(seen_exception=SEEN))
    assert (verdict.outcome, verdict.exit_code) == ("completed", 3)
    assert verdict.evidence[0] == "training completed; the script then exited with code 3"
    assert "ValueError: bad shape" in verdict.evidence[-1]


@pytest.mark.parametrize("status", [CODE(code=0), BY["SIGABRT"], BY["SIGKILL"], exit_status(134 << 8)])
def test_a_signal_after_completion_is_named_and_takes_nothing_from_it(status: ExitStatus) -> None:
    verdict = judge(status, words("completed"), Facts())
    assert (verdict.outcome, verdict.exit_code) == ("completed", 0)
    assert status.signal_name in " ".join(verdict.evidence)


def test_a_command_that_cannot_be_started_is_final_but_want_of_room_is_not() -> None:
    assert not_started("./train", OSError(errno.ENOEXEC, "Exec format error")).outcome == "not-started"
    assert not_started("python", OSError(errno.EAGAIN, "Try again")).outcome == "failed"


def test_the_hint_below_an_exception_in_the_output_is_that_of_the_verdict() -> None:
    seen = SeenException(kind="UsageError", message="no", frame="train.py:3", hint="give --run-dir")
    assert judge(CODE(code=1), None, Facts(seen_exception=seen)).hint == "give --run-dir"


def _failed(message: str, kind: str = "ValueError") -> Verdict:
    return Verdict(outcome="failed", confidence="certain", evidence=(), kind=kind, message=message)


def test_fingerprints_ignore_numbers_and_addresses_and_nothing_else() -> None:
    first = _failed("step 41 at 0x7fa31c: bad").fingerprint
    assert first == _failed("step 97 at 0x55de00: bad").fingerprint
    assert first != _failed("step 41 at 0x7fa31c: worse").fingerprint
    assert first != _failed("step 41 at 0x7fa31c: bad", kind="KeyError").fingerprint
