"""What two attempts died of is not tried a third time, as long as there is anything else to try."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import unbroken
from unbroken.checkpoint.store import Checkpoint, CheckpointStore
from unbroken.errors import StateMismatchError
from unbroken.rundir import layout
from unbroken.rundir.files import write_json
from unbroken.rundir.identity import new_attempt
from unbroken.storage.local import LocalStorage
from unbroken.training import resume

from ..checkpoint.states import RUN_ID, snapshot_at
from .processes import train
from .runs import flip, names, steps

SCRIPT = Path(__file__).with_name("crashing_script.py")


def attempt(
    run_dir: Path, count: int = 0, how: str = "killed", deadly: str = "", resume: str = "auto"
) -> tuple[int, str]:
    done = train(run_dir, str(count), how, deadly, resume, script=SCRIPT)
    return done.returncode, done.stderr


def records(run_dir: Path) -> list[str]:
    found = [json.loads(path.read_text()) for path in sorted(run_dir.glob("attempts/*/restoring.json"))]
    return [record["checkpoint"] for record in found]


def quarantined(run_dir: Path) -> dict[str, str]:
    paths = run_dir.glob("quarantine/*/reason.json")
    return {path.parent.name: json.loads(path.read_text())["reason"] for path in paths}


@pytest.mark.parametrize(("how", "code"), [("killed", -9), ("segfault", -11)])
def test_what_two_attempts_died_of_is_set_aside_loudly_and_the_next_older_one_is_taken(
    tmp_path: Path, how: str, code: int
) -> None:
    run_dir = tmp_path / "run"
    assert attempt(run_dir, 3)[0] == 0
    for number in (1, 2):
        assert attempt(run_dir, 0, how, "3")[0] == code
        assert records(run_dir) == ["step-00000003"] * number
        assert names(run_dir)[-1] == "step-00000003"
    returned, said = attempt(run_dir, 2, how, "3")
    # Where it went on it reached step 3 by itself, and a new checkpoint of that name was no problem.
    assert returned == 0, said
    assert "resumed from step-00000002 (step 2" in said
    reason = "attempts 2, 3 died while they restored it"
    assert f"step-00000003 was passed over: {reason}; now in quarantine/step-00000003" in said
    assert quarantined(run_dir) == {"step-00000003": reason}
    assert CheckpointStore(run_dir).storage.list("quarantine/step-00000003/step-00000003") != []
    assert names(run_dir) == [f"step-0000000{step}" for step in (1, 2, 3, 4)]
    assert records(run_dir) == []


def test_a_single_death_is_forgotten_once_a_restore_has_succeeded(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert attempt(run_dir, 2)[0] == 0
    for _ in range(2):
        assert attempt(run_dir, 0, deadly="2")[0] == -9
        assert attempt(run_dir)[0] == 0
        assert records(run_dir) == []
    assert names(run_dir) == ["step-00000001", "step-00000002"]
    assert quarantined(run_dir) == {}


def test_the_only_checkpoint_is_tried_again_and_again_for_there_is_nothing_else(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert attempt(run_dir, 1)[0] == 0
    for _ in range(3):
        assert attempt(run_dir, 0, deadly="1")[0] == -9
    assert names(run_dir) == ["step-00000001"]
    # The machine was to blame, and is well again.
    returned, said = attempt(run_dir)
    assert returned == 0
    assert "resumed from step-00000001" in said
    assert "attempts 2, 3, 4 died while they restored it" in said
    assert quarantined(run_dir) == {}


def test_when_attempts_died_of_all_checkpoints_none_is_set_aside_and_the_newest_is_tried_again(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    assert attempt(run_dir, 2)[0] == 0
    for _ in range(5):
        assert attempt(run_dir, 0, deadly="1,2")[0] == -9
    assert records(run_dir) == [f"step-0000000{step}" for step in (2, 2, 1, 1, 2)]
    assert names(run_dir) == ["step-00000001", "step-00000002"]
    returned, said = attempt(run_dir)
    assert returned == 0
    assert "resumed from step-00000002" in said
    assert names(run_dir) == ["step-00000001", "step-00000002"]
    assert (quarantined(run_dir), records(run_dir)) == ({}, [])


class Part:
    """Restores, or raises what it is told to."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def state_dict(self) -> dict[str, Any]:
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.error is not None:
            raise self.error


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    with unbroken.Run(tmp_path, save=[unbroken.EverySteps(1)], keep=[], part=Part()) as run:
        steps(run, 2)
    return tmp_path


def resume_with(run_dir: Path, **parts: Any) -> unbroken.Run:
    with unbroken.Run(run_dir, **parts) as run:
        return run


def test_objects_that_do_not_fit_are_not_the_fault_of_the_checkpoint(trained: Path) -> None:
    for _ in range(3):
        with pytest.raises(StateMismatchError):
            resume_with(trained, part=Part(), more={"n": 0})
    assert resume_with(trained, part=Part()).step_count == 2


@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt(), SystemExit(3)])
def test_an_exception_while_restoring_names_the_checkpoint_and_does_not_count_against_it(
    trained: Path, error: BaseException
) -> None:
    for _ in range(3):
        with pytest.raises(type(error)) as caught:
            resume_with(trained, part=Part(error))
        assert "while step-00000002 was restored" in caught.value.__notes__[0]
        assert records(trained) == []
    assert resume_with(trained, part=Part()).step_count == 2


def test_an_object_that_refuses_its_state_is_named_and_does_not_count_against_the_checkpoint(
    trained: Path,
) -> None:
    for _ in range(3):
        with pytest.raises(StateMismatchError, match=r"^part: .*refuses the state .*: ZeroDivisionError"):
            resume_with(trained, part=Part(ZeroDivisionError()))
        assert records(trained) == []
    assert resume_with(trained, part=Part()).step_count == 2


def test_a_checkpoint_that_is_named_is_tried_whatever_attempts_died_of_it(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert attempt(run_dir, 2)[0] == 0
    for _ in range(2):
        assert attempt(run_dir, 0, deadly="2")[0] == -9
    returned, said = attempt(run_dir, 0, resume="step-00000002")
    assert returned == 0
    assert "resumed from step-00000002" in said
    assert names(run_dir) == ["step-00000001", "step-00000002"]


def load(checkpoint: Checkpoint) -> list[str]:
    checkpoint.load()
    return []


class TestChoice:
    """The choice alone, by records such as attempts leave."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> CheckpointStore:
        store = CheckpointStore(tmp_path)
        for step in (1, 2, 3):
            store.save(snapshot_at(step, state={"model": {"words": bytes([step]) * 90}}))
        return store

    def died(self, store: CheckpointStore, name: str, **changes: str) -> Path:
        """Leave the record of a further attempt that died of the checkpoint `name`; return its directory."""
        created = store.get(name).manifest.created
        directory = self.attempt(store)
        write_json(directory / layout.RESTORING_FILE, {"checkpoint": name, "created": created, **changes})
        return directory

    def attempt(self, store: CheckpointStore) -> Path:
        assert isinstance(store.storage, LocalStorage)
        root = store.storage.root
        return layout.attempt_directory(root, new_attempt(root))

    def chosen(self, store: CheckpointStore) -> resume.Candidate:
        restoring = resume.Restoring(self.attempt(store), lambda checkpoint: list(checkpoint.load()))
        found = resume.choose(store, "auto", RUN_ID, restoring)
        assert found is not None
        return found

    def test_nothing_is_set_aside_before_an_older_one_is_restored(self, store: CheckpointStore) -> None:
        for _ in range(2):
            self.died(store, "step-00000003")
        found = self.chosen(store)
        assert (found.checkpoint.name, list(found.later)) == ("step-00000002", ["step-00000003"])
        assert len(store.names()) == 3
        resume.set_later_aside(store, found)
        assert store.names() == ["step-00000001", "step-00000002"]
        assert list(found.passed_over) == ["step-00000003"]

    def test_a_new_checkpoint_under_the_name_of_one_that_was_deadly_is_not_suspected(
        self, store: CheckpointStore
    ) -> None:
        for _ in range(2):
            self.died(store, "step-00000003", created="2020-01-01T00:00:00+00:00")
        assert self.chosen(store).checkpoint.name == "step-00000003"

    @pytest.mark.parametrize("signal", ["SIGTERM", "SIGINT", "SIGHUP"])
    def test_attempts_that_were_asked_to_end_did_not_die_of_it(
        self, store: CheckpointStore, signal: str
    ) -> None:
        for _ in range(2):
            write_json(self.died(store, "step-00000003") / layout.EXIT_FILE, {"signal": signal})
        assert self.chosen(store).checkpoint.name == "step-00000003"

    @pytest.mark.parametrize("end", [{"signal": "SIGKILL"}, {"signal": "", "code": 1}, {}])
    def test_attempts_that_ended_otherwise_did(self, store: CheckpointStore, end: dict[str, Any]) -> None:
        for _ in range(2):
            write_json(self.died(store, "step-00000003") / layout.EXIT_FILE, end)
        assert self.chosen(store).checkpoint.name == "step-00000002"

    def test_records_that_cannot_be_read_accuse_nothing(self, store: CheckpointStore) -> None:
        for _ in range(2):
            (self.died(store, "step-00000003") / layout.RESTORING_FILE).write_text("{")
        assert self.chosen(store).checkpoint.name == "step-00000003"

    def test_a_damaged_one_is_set_aside_even_if_only_a_deadly_one_is_left(
        self, store: CheckpointStore, tmp_path: Path
    ) -> None:
        for step in (1, 2):
            flip(tmp_path / f"checkpoints/step-0000000{step}/state-00.safetensors")
        for _ in range(2):
            self.died(store, "step-00000003")
        found = self.chosen(store)
        assert (found.checkpoint.name, found.died, found.later) == ("step-00000003", (1, 2), {})
        assert list(found.passed_over) == ["step-00000002", "step-00000001"]
        assert store.names() == ["step-00000003"]
