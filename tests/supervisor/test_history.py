"""What is known of attempts that this process did not start: from the journal, and from the kernel."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unbroken.errors import RunBusyError
from unbroken.rundir.adopted_tree import AdoptedTree, tagged
from unbroken.rundir.identity import open_run
from unbroken.rundir.pidfd import HeldProcess
from unbroken.rundir.processes import identify, identify_self, read_stat
from unbroken.supervisor.adoption import find, is_to_go_on
from unbroken.supervisor.history import Past, ended_from_json, ended_to_json, past_of
from unbroken.supervisor.judging.verdict import Verdict
from unbroken.supervisor.launch import supervisor_command
from unbroken.supervisor.restart_policy import Decision, Ended
from unbroken.supervisor.states import Snapshot, read_state, write_state
from unbroken.supervisor.survivors import refuse_beside_survivors


def _refused(_: int) -> int:
    raise PermissionError("not in this container")


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("has_pidfd", [True, False])
@pytest.mark.parametrize(("end_by", "status"), [("exit 42", 42 << 8), ("kill -9 $child", 9)])
def test_the_exit_of_a_process_that_is_not_our_child_is_learned(
    tmp_path: Path, end_by: str, status: int, has_pidfd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_pidfd:
        monkeypatch.setattr(os, "pidfd_open", _refused)
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
        until(lambda: (now := read_stat(parent.pid)) is not None and now.name == "sleep")
        (tmp_path / "end").write_text("now\n")
        until(lambda: held.has_ended)
        assert held.wait_status() == status
    finally:
        held.close()
        parent.kill()
        parent.communicate()


@pytest.mark.parametrize("has_function", [True, False])
def test_an_attempt_is_not_taken_for_ended_where_no_process_can_be_held(
    tmp_path: Path, has_function: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_function:
        monkeypatch.setattr(os, "pidfd_open", _refused)
    else:
        monkeypatch.delattr(os, "pidfd_open")
    job = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        tree = AdoptedTree(tmp_path, 1, identify(job.pid))
        assert not tree.collect()
        assert not tree.leader_ended
        assert tree.end(term_seconds=20, kill_seconds=20) == []
        assert job.wait(timeout=20) == -15
    finally:
        job.kill()
        job.wait()


def test_the_processes_of_a_run_are_known_by_whatever_way_it_was_reached(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "way").symlink_to(tmp_path)
    tags = {"UNBROKEN_RUN_DIR": str(tmp_path / "way" / "run"), "UNBROKEN_ATTEMPT": "3"}
    job = subprocess.Popen(["sleep", "600"], env={**os.environ, **tags})
    try:
        assert tagged(tmp_path / "run") == [(job.pid, 3)]
        assert tagged(tmp_path / "another") == []
        of_it = AdoptedTree(tmp_path / "run", 3, None).members()
        assert [member.process_id for member in of_it] == [job.pid]
    finally:
        job.kill()
        job.wait()


def a_run(directory: Path, **fields: Any) -> Snapshot:
    """Make a run that a supervisor of this process keeps going, as attempt 1."""
    identity = open_run(directory)
    values: dict[str, Any] = {
        "state": "running",
        "reason": "",
        "run_id": identity.run_id,
        "name": identity.name,
        "command": ("sleep", "600"),
        "supervisor": identify_self(),
        "started_seconds": 0.0,
        "changed_seconds": 1.0,
        "grace_seconds": 1.0,
        "attempt": 1,
        "leader": identify_self(),
    }
    snapshot = Snapshot(**{**values, **fields})
    write_state(directory, snapshot)
    return snapshot


def journal(directory: Path, *events: dict[str, Any]) -> None:
    lines = [json.dumps({"time": 2.0, **event}) for event in events]
    (directory / "journal.jsonl").write_text("\n".join(lines) + "\n")


_STARTED = {"kind": "attempt-started", "attempt": 1}


def test_a_run_that_was_moved_is_no_copy_also_where_another_took_its_place(tmp_path: Path) -> None:
    old, moved, copy = (tmp_path / name for name in ("it", "moved", "copy"))
    snapshot = a_run(old)
    shutil.copytree(old, copy)
    old.rename(moved)
    a_run(old)
    assert read_state(moved) == snapshot
    seen = read_state(copy)
    assert seen is not None
    assert (seen.state, seen.leader) == ("lost", None)


def test_nothing_is_started_beside_a_leader_that_neither_tag_nor_group_tells_of(tmp_path: Path) -> None:
    job = subprocess.Popen(["sleep", "600"])
    gone = dataclasses.replace(identify_self(), start_ticks=1)
    try:
        a_run(tmp_path / "it", supervisor=gone, leader=identify(job.pid))
        (tmp_path / "it").rename(tmp_path / "moved")
        with pytest.raises(RunBusyError, match=rf"process {job.pid} \(attempt 1\)"):
            refuse_beside_survivors(tmp_path / "moved")
    finally:
        job.kill()
        job.wait()
    refuse_beside_survivors(tmp_path / "moved")


def test_whether_a_run_is_to_go_on_is_known_without_a_snapshot_that_can_be_read(tmp_path: Path) -> None:
    a_run(tmp_path)
    assert is_to_go_on(tmp_path) is False
    journal(tmp_path, {"kind": "run-started"}, _STARTED)
    (tmp_path / "supervisor-plan.json").write_text("{}")
    (tmp_path / "supervisor.json").write_text("")
    assert is_to_go_on(tmp_path) is True
    journal(tmp_path, {"kind": "run-started"}, _STARTED, {"kind": "run-ended", "state": "held"})
    assert is_to_go_on(tmp_path) is False
    elsewhere = dataclasses.replace(identify_self(), host="elsewhere", boot_id="another")
    a_run(tmp_path, supervisor=elsewhere)
    assert is_to_go_on(tmp_path) is None


def test_a_run_that_waited_for_its_next_start_can_be_taken_over_on_another_host(tmp_path: Path) -> None:
    elsewhere = dataclasses.replace(identify_self(), host="elsewhere", boot_id="another")
    a_run(tmp_path, state="backing-off", supervisor=elsewhere, leader=elsewhere)
    (tmp_path / "attempts" / "0001").mkdir(parents=True)
    journal(tmp_path, {"kind": "run-started"}, _STARTED)
    with pytest.raises(RunBusyError, match="its last attempt ran on elsewhere"):
        find(tmp_path)
    over = {"kind": "attempt-ended", "attempt": 1, "record": ended_to_json(ended())}
    journal(tmp_path, {"kind": "run-started"}, _STARTED, over)
    assert find(tmp_path).begun is None


def test_a_starter_that_was_killed_before_it_said_how_revives_nothing(tmp_path: Path) -> None:
    gone = dataclasses.replace(identify_self(), start_ticks=1)
    a_run(tmp_path, supervisor=gone, leader=None)
    plan = {"directory": str(tmp_path), "command": ["touch", str(tmp_path / "started")]}
    (tmp_path / "supervisor-plan.json").write_text(json.dumps(plan))
    command = supervisor_command(tmp_path, takes_over=False)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert done.returncode == 2
    assert b"expected a plan on stdin" in done.stdout
    assert not (tmp_path / "started").exists()


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
    ending = {"kind": "attempt-ending", "attempt": 4, "because": "no step", "ended_kind": "hang"}
    hung = past_of([began, first, ending]).begun
    assert hung is not None
    assert (hung.ended_because, hung.ended_kind) == ("no step", "hang")
    assert past_of([began, first, over]).begun is None
    assert past_of([began, first, over]).next_start is None
    waiting = past_of([began, first, over, decided])
    assert (len(waiting.ended), waiting.next_start) == (1, 9.0)
    assert waiting.ended[0].checkpoint == "step-00000003"
    assert not waiting.ended[0].rolled_back
    back = {**decided, "action": "roll-back", "reason": "rolled back", "back_to": "step-00000002"}
    rolled_back = past_of([began, first, over, back])
    assert (rolled_back.ended[0].rolled_back, rolled_back.ended[0].went_back) == (True, True)
    assert rolled_back.decision == Decision(action="roll-back", reason="rolled back", back_to="step-00000002")
    # Whoever took over in the pause said it once more; an older release said that it restarts.
    for said in (back, {**back, "action": "restart", "back_to": None}):
        (ended_once,) = past_of([began, first, over, back, {"kind": "run-revived"}, said]).ended
        assert (ended_once.rolled_back, ended_once.went_back) == (True, True)
    assert past_of([began, first, over, back, first]).decision is None
    assert past_of([began, first, over, finished]).ended_as == "held"
    assert past_of([began, first, over, finished, {"kind": "run-revived"}]).ended_as is None
    assert past_of([began, first, over, began]) == Past(first_checkpoint="step-00000001", last_attempt=4)
