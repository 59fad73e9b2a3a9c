"""Tables for the pure judgement: exit status, last words and facts -> verdict."""

from __future__ import annotations

import errno
import json
import os
import signal
from dataclasses import asdict, replace

import pytest

from unbroken.errors import StorageDeniedError, StorageError, StorageFullError
from unbroken.rundir.last_words import Ending, LastWords
from unbroken.supervisor.judging.outcome import judge, not_made, not_started
from unbroken.supervisor.judging.verdict import (
    ExitStatus,
    Facts,
    OomKills,
    RankFailure,
    SeenException,
    Verdict,
    Victim,
    exit_status,
)

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
    for number in (errno.ENOEXEC, errno.ENOENT, errno.EACCES):
        assert not_started("./train", OSError(number, os.strerror(number))).outcome == "not-started"


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (errno.EAGAIN, "memory"),
        (errno.ENOMEM, "memory"),
        (errno.EMFILE, "memory"),
        (errno.ENOSPC, "disk-full"),
        (errno.EDQUOT, "disk-full"),
        (errno.EROFS, "read-only"),
        (errno.EIO, "storage"),
        (errno.ESTALE, "storage"),
    ],
)
def test_what_is_in_the_way_of_a_start_and_may_pass_is_a_failure_with_its_cause(
    number: int, cause: str
) -> None:
    verdict = not_started("python", OSError(number, os.strerror(number)))
    assert (verdict.outcome, verdict.cause) == ("failed", cause)
    assert "check the command" not in verdict.hint


def test_an_attempt_that_gets_no_directory_has_the_cause_of_the_error_unless_it_is_one_of_rights() -> None:
    full = not_made(StorageFullError("run: no space", hint="free some"))
    assert (full.outcome, full.cause, full.hint) == ("failed", "disk-full", "free some")
    assert not_made(StorageError("run: stale", hint="")).cause == "storage"
    assert not_made(StorageDeniedError("run: no rights", hint="")).cause == ""


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


OWN = OomKills(machine=1, own_group=0, attempt=1)
VICTIM = Victim(process_id=812, name="python", size_bytes=61_000_000)
WORKER = SeenException(
    kind="RuntimeError",
    message="DataLoader worker (pid 9) is killed by signal: Killed.",
    frame="train.py:3 in step",
)


@pytest.mark.parametrize(
    ("status", "said", "facts", "outcome", "kind", "confidence"),
    [
        # The leader itself.
        (BY["SIGKILL"], words("running"), Facts(oom_kills=OWN), "killed", "out-of-memory", "likely"),
        (exit_status(137 << 8), None, Facts(oom_kills=OWN), "killed", "out-of-memory", "likely"),
        # A worker of it, whatever the leader made of that.
        (
            CODE(code=1),
            None,
            Facts(oom_kills=OWN, seen_exception=WORKER),
            "failed",
            "out-of-memory",
            "certain",
        ),
        (
            CODE(code=1),
            words("failed", kind="RuntimeError", message=WORKER.message),
            Facts(oom_kills=OWN),
            "failed",
            "out-of-memory",
            "certain",
        ),
        (CODE(code=1), None, Facts(oom_kills=OWN), "failed", "out-of-memory", "likely"),
        (CODE(code=0), None, Facts(oom_kills=OWN), "failed", "out-of-memory", "likely"),
        (CODE(code=0), words("running"), Facts(oom_kills=OWN), "vanished", "out-of-memory", "likely"),
        (None, words("running"), Facts(oom_kills=OWN), "lost", "out-of-memory", "likely"),
        # A pool waits for ever for it.
        (
            BY["SIGKILL"],
            words("running"),
            Facts(oom_kills=OWN, ended_because="no step for 14 minutes", ended_kind="hang"),
            "hung",
            "out-of-memory",
            "likely",
        ),
        # A connection to it ended.
        (
            CODE(code=1),
            words("failed", kind="DistBackendError", message="NCCL error: ncclRemoteError: ..."),
            Facts(oom_kills=OWN),
            "failed",
            "out-of-memory",
            "likely",
        ),
        (
            CODE(code=1),
            words("failed", kind="RuntimeError", message="Connection closed by peer [10.0.0.7]:4711"),
            Facts(oom_kills=OWN),
            "failed",
            "out-of-memory",
            "likely",
        ),
        # It had another reason to end, or none to fail.
        (CODE(code=1), None, Facts(oom_kills=OWN, seen_exception=SEEN), "failed", "ValueError", "likely"),
        (CODE(code=0), words("completed"), Facts(oom_kills=OWN), "completed", "", "certain"),
        (CODE(code=75), words("stopped"), Facts(oom_kills=OWN), "stopped", "", "certain"),
        # A group that others share proves less.
        (
            CODE(code=1),
            None,
            Facts(oom_kills=OomKills(own_group=1), seen_exception=WORKER),
            "failed",
            "out-of-memory",
            "likely",
        ),
        (CODE(code=1), None, Facts(oom_kills=OomKills(own_group=1)), "failed", "exit-1", "unknown"),
    ],
)
def test_a_kill_for_memory_in_its_own_group_explains_what_would_be_a_riddle(
    status: ExitStatus | None, said: LastWords | None, facts: Facts, outcome: str, kind: str, confidence: str
) -> None:
    verdict = judge(status, said, facts)
    assert (verdict.outcome, verdict.kind, verdict.confidence) == (outcome, kind, confidence)
    assert (verdict.cause == "memory") == (kind == "out-of-memory")
    assert "memory" in " ".join(verdict.evidence)


def test_the_victims_in_the_kernels_log_are_named() -> None:
    verdict = judge(BY["SIGKILL"], None, Facts(leader=812, oom_kills=OWN, victims=(VICTIM,)))
    assert "the kernel ended process 812 (python), which held 61 MB for that" in verdict.evidence[1]
    # The log alone is proof, where no group counts.
    alone = judge(BY["SIGKILL"], None, Facts(leader=812, victims=(VICTIM,)))
    assert (alone.cause, alone.confidence) == ("memory", "certain")


@pytest.mark.parametrize(
    ("status", "facts", "confidence"),
    [
        (BY["SIGKILL"], Facts(leader=812), "certain"),
        (BY["SIGKILL"], Facts(leader=7, processes=frozenset({7, 812})), "likely"),
        (exit_status(137 << 8), Facts(leader=7, processes=frozenset({7, 812})), "certain"),
        (exit_status(137 << 8), Facts(leader=7, processes=frozenset({7})), "likely"),
    ],
)
def test_only_of_the_process_that_ended_the_kernels_log_proves_why(
    status: ExitStatus, facts: Facts, confidence: str
) -> None:
    verdict = judge(status, words("running"), replace(facts, oom_kills=OWN, victims=(VICTIM,)))
    assert (verdict.cause, verdict.confidence) == ("memory", confidence)


def test_a_rank_that_lost_its_connection_does_not_hide_the_signal_that_ended_another() -> None:
    closed = "[/p/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.7]:4711"
    said = words("failed", kind="RuntimeError", message=closed)
    killed = RankFailure(rank=1, process_id=812, status=BY["SIGKILL"])
    facts = Facts(oom_kills=OWN, victims=(VICTIM,), rank_failure=killed)
    verdict = judge(CODE(code=1), said, facts)
    assert (verdict.outcome, verdict.cause, verdict.confidence) == ("killed", "memory", "certain")
    assert not verdict.is_saved
    assert any("the run said, at step 7: RuntimeError" in line for line in verdict.evidence)
    crashed = RankFailure(rank=1, process_id=71, status=BY["SIGSEGV"])
    assert judge(CODE(code=1), said, Facts(rank_failure=crashed)).kind == "SIGSEGV"
    # An exception of its own is a reason of its own.
    own = words("failed", kind="KeyError", message="'x'")
    assert judge(CODE(code=1), own, Facts(rank_failure=crashed)).kind == "KeyError"


def test_a_worker_that_somebody_killed_is_not_called_out_of_memory() -> None:
    none = OomKills(machine=0, own_group=0, attempt=0)
    verdict = judge(CODE(code=1), None, Facts(oom_kills=none, seen_exception=WORKER))
    assert (verdict.kind, verdict.cause) == ("RuntimeError", "")
    assert "not out of memory" in verdict.evidence[-1]
    # Another run of this machine did run out of it.
    beside = judge(CODE(code=1), None, Facts(oom_kills=replace(none, machine=2), seen_exception=WORKER))
    assert "not out of memory" in beside.evidence[-1]


def test_a_killer_that_no_kernel_counts_is_believed_by_its_own_word() -> None:
    facts = Facts(oom_kills=OomKills(machine=0), killer="systemd-oomd has ended 3 processes")
    for status in (BY["SIGKILL"], BY["SIGTERM"]):
        verdict = judge(status, words("running"), facts)
        assert (verdict.outcome, verdict.cause, verdict.confidence) == ("killed", "memory", "likely")
        assert "systemd-oomd" in verdict.evidence[-1]
    assert judge(None, words("running"), facts).cause == "memory"


@pytest.mark.parametrize(
    ("rank", "outcome", "kind"),
    [
        (ExitStatus(signal_number=9), "killed", "SIGKILL"),
        (ExitStatus(signal_number=11), "signalled", "SIGSEGV"),
        (ExitStatus(code=1), "failed", "ValueError"),
        (ExitStatus(code=78), "refused", "exit-78"),
        (ExitStatus(code=75), "stopped", ""),
    ],
)
def test_a_launchers_one_is_replaced_by_what_it_says_of_the_first_rank(
    rank: ExitStatus, outcome: str, kind: str
) -> None:
    failure = RankFailure(rank=3, process_id=71, status=rank)
    verdict = judge(CODE(code=1), None, Facts(seen_exception=SEEN, rank_failure=failure))
    assert (verdict.outcome, verdict.kind) == (outcome, kind)
    assert any("rank 3 (process 71)" in line for line in verdict.evidence)


def test_a_rank_that_saved_since_another_one_failed_does_not_hide_that() -> None:
    failure = RankFailure(rank=1, process_id=71, status=ExitStatus(signal_number=11))
    verdict = judge(CODE(code=1), words("stopped"), Facts(rank_failure=failure))
    assert (verdict.outcome, verdict.kind, verdict.is_saved) == ("signalled", "SIGSEGV", True)
    asked = judge(CODE(code=1), words("stopped"), Facts(rank_failure=failure, is_stop_asked=True))
    assert asked.outcome == "stopped"


def test_a_shells_zero_is_not_believed_against_a_traceback_at_the_end_of_the_output() -> None:
    last = SeenException(kind="ValueError", message="bad", frame="train.py:3", is_last=True)
    hidden = judge(CODE(code=0), None, Facts(seen_exception=last, is_code_hidden=True))
    assert (hidden.outcome, hidden.kind, hidden.confidence) == ("failed", "ValueError", "likely")
    # Python itself knows how it ended; and a traceback may be of something that was caught.
    assert judge(CODE(code=0), None, Facts(seen_exception=last)).outcome == "completed"
    assert judge(CODE(code=0), None, Facts(seen_exception=SEEN, is_code_hidden=True)).outcome == "completed"
    facts = Facts(seen_exception=last, is_code_hidden=True)
    assert judge(CODE(code=0), words("completed"), facts).outcome == "completed"


def test_what_the_supervisor_ended_for_want_of_progress_has_hung() -> None:
    facts = Facts(ended_because="no step for 14 minutes", ended_kind="hang")
    for status in (BY["SIGKILL"], BY["SIGTERM"], CODE(code=1)):
        verdict = judge(status, words("running"), facts)
        assert (verdict.outcome, verdict.confidence) == ("hung", "certain")
        assert "no step for 14 minutes" in verdict.evidence[0]
    assert judge(BY["SIGKILL"], words("completed"), facts).outcome == "completed"


@pytest.mark.parametrize(
    ("said", "restarted", "outcome", "cause"),
    [
        (None, False, "lost", ""),
        (words("running"), False, "lost", ""),
        (words("running"), True, "lost", "reboot"),
        (words("completed"), False, "completed", ""),
        (words("stopped"), True, "stopped", ""),
        (words("failed", kind="KeyError"), False, "failed", ""),
    ],
)
def test_what_ended_unseen_is_told_by_its_words_or_by_the_boot(
    said: LastWords | None, restarted: bool, outcome: str, cause: str
) -> None:
    verdict = judge(None, said, Facts(machine_restarted=restarted))
    assert (verdict.outcome, verdict.cause) == (outcome, cause)
    assert ("unknown" in " ".join(verdict.evidence)) == (not restarted or outcome == "stopped")


def test_a_stop_since_the_machine_is_taken_away_is_a_preemption() -> None:
    facts = Facts(is_stop_asked=True, is_preempted=True)
    saved = judge(CODE(code=75), words("stopped"), facts)
    assert (saved.outcome, saved.cause, saved.is_saved) == ("stopped", "preemption", True)
    assert judge(CODE(code=0), words("completed"), facts).cause == ""


def test_a_verdict_reads_back_from_json_as_it_was() -> None:
    verdict = judge(BY["SIGKILL"], None, Facts(oom_kills=OWN))
    assert Verdict.from_json(json.loads(json.dumps(asdict(verdict)))) == verdict
    assert Verdict.from_json({"outcome": "failed"}) is None
    assert Verdict.from_json({**asdict(verdict), "outcome": "of a later release"}) is None


@pytest.mark.parametrize("status", [BY["SIGKILL"], BY["SIGTERM"], CODE(code=1)])
def test_whatever_it_ended_with_the_supervisors_own_doing_is_told_once(status: ExitStatus) -> None:
    facts = Facts(ended_because="its time to save and stop was over", is_stop_asked=True)
    evidence = judge(status, words("running"), facts).evidence
    assert evidence.count("ended by its supervisor: its time to save and stop was over") == 1


def test_a_run_that_stops_to_go_back_says_where_to_and_why() -> None:
    said = words("stopped", kind="roll-back", reason="rolled back to step-00000004: loss 812.4", hint="look")
    verdict = judge(CODE(code=75), said, Facts())
    assert (verdict.outcome, verdict.kind, verdict.is_saved) == ("stopped", "roll-back", True)
    assert verdict.message == "rolled back to step-00000004: loss 812.4"
    assert "goes on from an earlier checkpoint: rolled back to step-00000004" in verdict.evidence[0]


def test_a_run_that_is_not_well_is_refused_a_restart_in_its_own_words() -> None:
    said = words(
        "failed", kind="unhealthy", exit_code=78, message="step 9: loss 812.4", hint="look at step 9"
    )
    verdict = judge(CODE(code=78), said, Facts())
    assert (verdict.outcome, verdict.kind, verdict.hint) == ("refused", "unhealthy", "look at step 9")
    assert "the run said, at step 7: unhealthy: step 9: loss 812.4" in verdict.evidence[0]
