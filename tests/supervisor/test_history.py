"""What is known of attempts that this process did not start: from the journal, and from the kernel."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from unbroken.rundir.pidfd import HeldProcess
from unbroken.rundir.processes import read_stat
from unbroken.supervisor.history import Past, ended_from_json, ended_to_json, past_of
from unbroken.supervisor.restart_policy import Ended
from unbroken.supervisor.verdict import Verdict


@pytest.mark.parametrize(("end_by", "status"), [("exit 42", 42 << 8), ("kill -9 $child", 9)])
def test_the_exit_of_a_process_that_is_not_our_child_is_learned(
    tmp_path: Path, end_by: str, status: int
) -> None:
    os.mkfifo(tmp_path / "end")
    # Its parent becomes a program that never collects it.
    text = f"(child=$(exec sh -c 'echo $PPID'); read line < end; {end_by}) & echo $!; exec sleep 600"
    parent = subprocess.Popen(["sh", "-c", text], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    process_id = int(parent.stdout.readline())
    found = read_stat(process_id)
    assert found is not None
    held = HeldProcess(process_id, found.start_ticks)
    try:
        with pytest.raises(ProcessLookupError):
            HeldProcess(process_id, found.start_ticks + 1)
        assert not held.has_ended
        (tmp_path / "end").write_text("now\n")
        until = time.monotonic() + 20
        while not held.has_ended:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert held.wait_status() == status
    finally:
        held.close()
        parent.kill()
        parent.communicate()


def ended(outcome: str = "signalled", **fields: Any) -> Ended:
    values = {"started_seconds": time.monotonic() - 5, "lived_seconds": 4.0, "has_words": True}
    verdict = Verdict(outcome=outcome, confidence="certain", evidence=("a", "b"), kind="SIGSEGV")  # type: ignore[arg-type]
    return Ended(**{"verdict": verdict, "made_step": True, "checkpoint": None, **values, **fields})


def test_an_attempt_reads_back_from_the_journal_as_it_was() -> None:
    before = ended(checkpoint="step-00000007")
    after = ended_from_json(json.loads(json.dumps(ended_to_json(before))))
    assert after is not None
    assert abs(after.started_seconds - before.started_seconds) < 1
    assert after.verdict == before.verdict
    assert (after.lived_seconds, after.checkpoint) == (4.0, "step-00000007")
    assert ended_from_json({"verdict": {"outcome": "of a later release"}}) is None
    assert ended_from_json(None) is None


def test_the_journal_tells_where_the_last_supervisor_was() -> None:
    record = ended_to_json(ended())
    began = {"kind": "run-started", "first_checkpoint": "step-00000001", "time": 1.0}
    first = {"kind": "attempt-started", "attempt": 4, "listed": "step-00000001", "time": 2.0}
    over = {"kind": "attempt-ended", "attempt": 4, "record": record, "time": 3.0}
    decided = {"kind": "decision", "next_start": 9.0, "checkpoint": "step-00000003", "time": 3.5}
    finished = {"kind": "run-ended", "state": "held", "reason": "enough", "time": 4.0}
    assert past_of([]) == Past()
    assert past_of([began]).first_checkpoint == "step-00000001"
    running = past_of([began, first]).begun
    assert running is not None
    assert (running.attempt, running.started, running.listed) == (4, 2.0, "step-00000001")
    collected = past_of([began, first, {"kind": "leader-ended", "attempt": 4, "wait_status": 11}]).begun
    assert collected is not None
    assert collected.wait_status == 11
    assert past_of([began, first, over]).begun is None
    assert past_of([began, first, over]).next_start is None
    waiting = past_of([began, first, over, decided])
    assert (len(waiting.ended), waiting.next_start) == (1, 9.0)
    assert waiting.ended[0].checkpoint == "step-00000003"
    assert past_of([began, first, over, finished]).ended_as == "held"
    assert past_of([began, first, over, finished, {"kind": "run-revived"}]).ended_as is None
    assert past_of([began, first, over, began]) == Past(first_checkpoint="step-00000001", last_attempt=4)
