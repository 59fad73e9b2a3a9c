"""Going back by one checkpoint, decided by the supervisor while nothing of the run runs."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from unbroken.checkpoint.snapshot import Snapshot
from unbroken.checkpoint.store import CheckpointStore, newest_verified
from unbroken.errors import DamagedError
from unbroken.rundir import layout
from unbroken.rundir.rollbacks import Rollback, add_rollback, read_rollbacks
from unbroken.supervisor.rolling_back import older_checkpoint, roll_back, went_back

from ..checkpoint.states import snapshot_at
from .conftest import Bench
from .in_process import look


def small(step: int, **described: object) -> Snapshot:
    snapshot = snapshot_at(step, state={"model": {"step": step}})
    description = dataclasses.replace(snapshot.description, **described)  # type: ignore[arg-type]
    return dataclasses.replace(snapshot, description=description)


def saved(directory: Path, *snapshots: Snapshot) -> CheckpointStore:
    store = CheckpointStore(directory)
    for snapshot in snapshots:
        store.save(snapshot)
    return store


def test_the_older_checkpoint_is_of_fewer_steps_and_intact(tmp_path: Path) -> None:
    assert older_checkpoint(tmp_path) is None
    saved(tmp_path, small(2))
    assert older_checkpoint(tmp_path) is None
    saved(tmp_path, small(4), small(6), small(6))
    assert older_checkpoint(tmp_path) == "step-00000004"
    (tmp_path / "checkpoints/step-00000004/manifest.json").write_bytes(b"{}")
    assert older_checkpoint(tmp_path) == "step-00000002"


def test_what_was_rolled_back_already_is_nothing_to_go_back_from_or_to(tmp_path: Path) -> None:
    saved(tmp_path, small(2), small(4), small(6))
    undone = Rollback(decided_by="health", reason="r", attempt=1, found_step=7, trusted_step=4)
    add_rollback(tmp_path, undone)
    assert older_checkpoint(tmp_path) == "step-00000002"
    saved(tmp_path, small(8, rollbacks=1))
    assert older_checkpoint(tmp_path) == "step-00000004"


def undone(found_step: int, trusted_step: int) -> Rollback:
    return Rollback(
        decided_by="supervisor", reason="r", attempt=1, found_step=found_step, trusted_step=trusted_step
    )


def test_a_run_that_got_no_farther_since_it_went_back_goes_farther_back(tmp_path: Path) -> None:
    saved(tmp_path, small(2), small(4), small(6))
    layout.attempt_directory(tmp_path, 2).mkdir(parents=True)
    add_rollback(tmp_path, undone(7, 4))
    assert older_checkpoint(tmp_path) == "step-00000002"
    # It has saved what was given up anew, as bad as it was.
    saved(tmp_path, small(6, rollbacks=1))
    assert older_checkpoint(tmp_path) == "step-00000002"
    roll_back(tmp_path, "step-00000002", reason="r", step=7)
    assert [one.in_a_row for one in read_rollbacks(tmp_path)] == [1, 2]


def test_a_run_that_got_past_the_place_that_it_went_back_for_goes_back_by_one_checkpoint(
    tmp_path: Path,
) -> None:
    saved(tmp_path, small(2), small(4))
    add_rollback(tmp_path, undone(7, 4))
    saved(tmp_path, small(6, rollbacks=1), small(8, rollbacks=1))
    assert older_checkpoint(tmp_path) == "step-00000006"


def test_what_was_given_up_is_no_progress(tmp_path: Path) -> None:
    saved(tmp_path, small(2), small(4), small(6))
    layout.attempt_directory(tmp_path, 2).mkdir(parents=True)
    assert newest_verified(tmp_path) == "step-00000006"
    assert not went_back(tmp_path, 1)
    add_rollback(tmp_path, undone(7, 4))
    assert newest_verified(tmp_path) == "step-00000004"
    assert went_back(tmp_path, 1)
    assert not went_back(tmp_path, 2)
    saved(tmp_path, small(5, rollbacks=1))
    assert newest_verified(tmp_path) == "step-00000005"
    (tmp_path / layout.ROLLBACKS_FILE).write_text("3")
    assert not went_back(tmp_path, 1)


def test_a_roll_back_is_recorded_once_for_each_attempt(tmp_path: Path) -> None:
    saved(tmp_path, small(2), small(4), small(6))
    layout.attempt_directory(tmp_path, 3).mkdir(parents=True)
    roll_back(tmp_path, "step-00000004", reason="loss is nan", step=7)
    roll_back(tmp_path, "step-00000002", reason="loss is nan", step=7)
    expected = Rollback(
        decided_by="supervisor", reason="loss is nan", attempt=3, found_step=7, trusted_step=4
    )
    assert read_rollbacks(tmp_path) == (expected,)
    # Whoever takes over from a supervisor that was killed just then decides the same.
    assert older_checkpoint(tmp_path) == "step-00000004"
    layout.attempt_directory(tmp_path, 4).mkdir()
    assert older_checkpoint(tmp_path) == "step-00000002"
    roll_back(tmp_path, "step-00000002", reason="loss is nan", step=None)
    assert [one.trusted_step for one in read_rollbacks(tmp_path)] == [4, 2]


def test_without_knowing_what_was_rolled_back_nothing_is_chosen(tmp_path: Path) -> None:
    saved(tmp_path, small(2), small(4))
    (tmp_path / layout.ROLLBACKS_FILE).write_text('{"rollbacks": 3}')
    with pytest.raises(DamagedError, match="list of roll-backs"):
        older_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("bad_since", "back_to"),
    # What is saved once more after the first roll-back is as bad, so that the next one goes farther.
    [(5, [4]), pytest.param(3, [4, 2], marks=pytest.mark.chaos)],
)
def test_a_run_gets_past_checkpoints_that_make_its_numbers_not_finite(
    bench: Bench, bad_since: int, back_to: list[int]
) -> None:
    # A finite state that is bad, as of a flipped bit in a weight, is saved before anybody notices.
    script = bench.script(
        "train.py",
        """
        import os
        import sys
        import unbroken

        weights = {"bad": 0}
        with unbroken.Run(save=[unbroken.EverySteps(2)], keep=[], weights=weights) as run:
            while run.step_count < 10:
                if os.environ["UNBROKEN_ATTEMPT"] == "1" and run.step_count == int(sys.argv[1]):
                    weights["bad"] = 1
                if weights["bad"] and run.step_count == 7:
                    raise FloatingPointError("loss is nan")
                run.step(loss=1.0)
        """,
    )
    done = bench.run(sys.executable, script, str(bad_since))
    assert done.returncode == 0, done.stdout + done.stderr
    decisions = [event["action"] for event in bench.events("decision")]
    assert decisions == ["restart", "roll-back"] * len(back_to)
    found = bench.read("rollbacks.json")["rollbacks"]
    assert [(one["decided_by"], one["attempt"], one["trusted_step"]) for one in found] == [
        ("supervisor", 2 * number, step) for number, step in enumerate(back_to, start=1)
    ]
    reasons = [json.loads(path.read_text()) for path in bench.directory.glob("quarantine/*/reason.json")]
    given_up = sorted(reason["checkpoint"] for reason in reasons)
    assert given_up == [f"step-0000000{step}" for step in ([4, 6, 6] if bad_since < 4 else [6])]
    assert all("loss is nan" in reason["reason"] for reason in reasons)
    said = "rolled back to step-00000004: loss is nan, 2 times in a row, at step 7"
    assert said in done.stderr
    told = json.loads(look(bench, "why", "it", "--attempt", "2", "--json").stdout)["attempt"]
    assert (told["cause"], told["decision"]["action"], told["decision"]["reason"]) == (
        "not-finite",
        "roll-back",
        said,
    )
    assert (
        "decided     roll-back: rolled back to step-00000004"
        in look(bench, "why", "it", "--attempt", "2").stdout
    )


@pytest.mark.chaos
def test_a_run_that_stops_to_go_back_is_started_again_and_gets_past_it(bench: Bench) -> None:
    # Each attempt from the bad checkpoint ends in another way, as if it had nothing to do with it.
    script = bench.script(
        "train.py",
        """
        import os
        import signal
        import unbroken

        attempt = int(os.environ["UNBROKEN_ATTEMPT"])
        weights = {"bad": 0}
        health = unbroken.Health(spike="off", divergence="off", plateau="off")
        with unbroken.Run(save=[unbroken.EverySteps(20)], weights=weights, health=health) as run:
            while run.step_count < 60:
                bad = weights["bad"]
                weights["bad"] = int(bad or (attempt == 1 and run.step_count == 39))
                # What was saved is bad, not what was in memory: without a resume all was well.
                run.step(loss=2.0 if bad and attempt > 1 else 1.0)
                if bad and run.step_count == 51:
                    if attempt == 2:
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise (ValueError if attempt == 1 else KeyError)
        """,
    )
    done = bench.python(script)
    assert done.returncode == 0, done.stdout + done.stderr
    decisions = bench.events("decision")
    assert [event["action"] for event in decisions] == ["restart", "restart", "restart", "roll-back"]
    assert decisions[-1]["reason"].startswith(
        "rolled back to step-00000020: after the resume from step-00000040"
    )
    assert decisions[-1]["next_start"] - decisions[-1]["time"] < 0.5
    assert [event["alarm"] for event in bench.events("alarm")] == ["resume", "resume", "roll-back"]
    (rollback,) = bench.read("rollbacks.json")["rollbacks"]
    assert (rollback["decided_by"], rollback["attempt"], rollback["trusted_step"]) == ("resume", 4, 20)
    assert bench.verdict(4)["kind"] == "roll-back"
    certificate = json.loads(look(bench, "why", "it", "--attempt", "3", "--json").stdout)
    assert certificate["attempt"]["resume_certificate"]["equal_steps"] == 11
