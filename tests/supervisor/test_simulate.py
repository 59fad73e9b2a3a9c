"""Failures that users rehearse: each for real, and each promise looked at."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from unbroken.cli import simulate as command
from unbroken.cli.simulations import memory_group, stage
from unbroken.cli.simulations.failures import FAILURES, STEPS, judge
from unbroken.cli.simulations.job import undisturbed_value
from unbroken.cli.simulations.story import Story, read_story
from unbroken.rundir.journal import Journal
from unbroken.rundir.processes import identify
from unbroken.supervisor.states import Snapshot, write_state

from ..out_of_memory import one_at_a_time
from .conftest import Bench


def simulated(bench: Bench, failure: str) -> dict[str, Any]:
    done = bench.cli("simulate", failure, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["came_through"]
    assert all(promise["is_kept"] for promise in found["promises"])
    assert found["steps"] == STEPS
    seconds = [moment["seconds"] for moment in found["moments"]]
    assert seconds == sorted(seconds)
    return found


def words(found: dict[str, Any]) -> str:
    return "\n".join("\n".join([moment["text"], *moment["details"]]) for moment in found["moments"])


def test_a_crash_is_explained_and_restarted_from_the_newest_checkpoint(bench: Bench) -> None:
    found = simulated(bench, "crash")
    said = words(found)
    assert "RuntimeError: the data server did not answer" in said
    assert "attempt 2 goes on from step-00000020, after step 20" in said
    assert "the run ended: done" in said
    assert found["steps_done_again"] == 5


@pytest.mark.chaos
def test_memory_that_runs_out_is_told_from_other_kills_or_a_stand_in_is_named(bench: Bench) -> None:
    with one_at_a_time():
        said = words(simulated(bench, "oom"))
    assert "out of memory" in said or "stand-in: no memory cgroup" in said


@pytest.mark.chaos
def test_a_hang_is_ended_and_the_function_named(bench: Bench) -> None:
    said = words(simulated(bench, "hang"))
    assert "in phase training, after step 25; the limit is 1.5 s" in said
    assert "in hurt" in said


@pytest.mark.chaos
def test_a_preemption_costs_no_step(bench: Bench) -> None:
    found = simulated(bench, "preempt")
    assert "notice of aws: the spot instance is interrupted" in words(found)
    assert found["steps_done_again"] == 0


@pytest.mark.chaos
def test_a_full_disk_is_waited_for(bench: Bench) -> None:
    done = bench.cli("simulate", "disk", "--json")
    if "no small disk can be made here" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    said = words(json.loads(done.stdout))
    assert said.index("the disk is full") < said.index("phase disk-full") < said.index("there is space again")


@pytest.mark.chaos
def test_a_killed_supervisor_is_replaced_and_the_job_never_notices(bench: Bench) -> None:
    said = words(simulated(bench, "kill-supervisor"))
    assert "is ended by SIGKILL" in said
    assert "another supervisor takes over" in said
    assert "attempt 2" not in said


def story(**changes: Any) -> Story:
    """What is left of a crash that went as promised."""
    told = {"outcome": "failed", "evidence": ["an exception"]}
    good = Story(
        moments=(),
        verdicts=(told, {"outcome": "completed", "evidence": ["said so"]}),
        steps=(*range(1, 26), *range(21, STEPS + 1)),
        resumed_at=(0, 20),
        final_value=undisturbed_value(STEPS),
        state="done",
        exit_code=0,
    )
    return replace(good, **changes)


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({}, []),
        ({"state": "held", "exit_code": 78}, ["the run came to its end by itself"]),
        ({"final_value": 1.0}, ["its result is that of a run that nothing happens to, bit for bit"]),
        (
            {"steps": (*range(1, 26), *range(22, STEPS))},
            [
                f"each of its {STEPS} steps is done",
                "no more was lost than since then: 5 steps are done again",
            ],
        ),
        ({"resumed_at": (0, 10)}, ["it went on from its newest checkpoint, after step 20"]),
        (
            {"verdicts": ({"outcome": "killed", "evidence": ["SIGKILL"]}, {})},
            ["the exception is named, with the place where it was raised"],
        ),
    ],
)
def test_what_was_not_kept_is_named(changes: dict[str, Any], broken: list[str]) -> None:
    promises = judge(FAILURES["crash"], story(**changes))
    assert [promise.text for promise in promises if not promise.is_kept] == broken


def test_the_exit_code_says_whether_it_came_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_perform", lambda failure: story())
    done = CliRunner().invoke(command.simulate, ["crash"])
    assert done.exit_code == 0
    assert "kept    it was restarted once" in done.output
    monkeypatch.setattr(command, "_perform", lambda failure: story(state="held"))
    done = CliRunner().invoke(command.simulate, ["crash"])
    assert done.exit_code == 1
    assert "BROKEN  the run came to its end by itself" in done.output


def test_where_no_memory_group_can_be_made_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_group, "_places", lambda: iter([Path("/proc/none/unbroken")]))
    with memory_group.memory_group() as group:
        assert group is None


@pytest.mark.parametrize("is_reused", [False, True])
def test_a_rehearsal_that_went_wrong_ends_its_job_but_no_stranger_with_its_number(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, is_reused: bool
) -> None:
    # Whoever is asked to stop it answers too late.
    monkeypatch.setattr(stage, "_PATIENCE_SECONDS", 0.05)
    process = bench.popen(["sleep", "600"], start_new_session=True)
    leader = identify(process.pid)
    assert leader is not None
    gone = replace(leader, start_ticks=leader.start_ticks - 1)
    state = Snapshot(
        state="running",
        reason="",
        run_id="x",
        name="it",
        command=("sleep", "600"),
        supervisor=gone,
        started_seconds=1.0,
        changed_seconds=1.0,
        grace_seconds=1.0,
        leader=gone if is_reused else leader,
    )
    place = stage.Stage(bench.place)
    place.directory.mkdir()
    write_state(place.directory, state)
    place.leave()
    # Too late for one that was killed.
    process.terminate()
    assert process.wait(timeout=10) == -(signal.SIGTERM if is_reused else signal.SIGKILL)


def test_events_that_nobody_has_words_for_are_told_by_their_name(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.append("moon-eclipsed", attempt=1, reason="it is dark", count=3)
        journal.append("notice", unknown="a field of another release")
    moments = read_story(tmp_path, []).moments
    assert [(moment.text, moment.details) for moment in moments] == [
        ("moon eclipsed", ("it is dark",)),
        ("notice", ("a field of another release",)),
    ]
