"""Workers of a MultiWorkerMirroredStrategy: one run, one committer, and all of them at the same step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from unbroken import Run
from unbroken.checkpoint.store import CheckpointStore
from unbroken.errors import UsageError
from unbroken.rundir import layout

from .. import quiet_tensorflow  # noqa: F401
from ..training.runs import flip
from ..zygote import run_script

SCRIPT = Path(__file__).with_name("multi_worker_script.py")
PATIENCE_SECONDS = 600


class Trained:
    """What the script has left, attempt after attempt."""

    def __init__(self, place: Path) -> None:
        self.run, self.out = place / "run", place / "out"

    def go(self, **options: Any) -> Trained:
        self.out.mkdir(parents=True, exist_ok=True)
        words = [f"{name}={json.dumps(value)}" for name, value in options.items()]
        arguments = (str(self.run), str(self.out), *words)
        done = run_script(SCRIPT, *arguments, output=self.out / "said", framework="tensorflow")
        self.said = done.stderr
        self.codes: list[int] = json.loads((self.out / "codes.json").read_text())
        return self

    def seen(self) -> list[Any]:
        """Return what each worker saw in each step, the last time that it did that, and what it has now."""
        lines = [self.out.joinpath(f"{rank}.jsonl").read_text().splitlines() for rank in range(2)]
        steps = [{line["step"]: line for line in map(json.loads, of)} for of in lines]
        return [*steps, *(self.out.joinpath(f"{rank}.txt").read_text() for rank in range(2))]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    trained = Trained(tmp_path_factory.mktemp("expected")).go()
    assert trained.codes == [0, 0], trained.said
    return trained.seen()


def test_workers_of_which_one_is_killed_go_on_bit_for_bit(tmp_path: Path, expected: list[Any]) -> None:
    trained = Trained(tmp_path).go(kill=5)
    assert trained.codes == [-9, -9]
    trained.go()
    assert trained.codes == [0, 0], trained.said
    assert trained.seen() == expected
    manifest = CheckpointStore(trained.run).latest().manifest
    own = {path for path in manifest.tensors if path.startswith("ranks/1/")}
    # Weights and moments are there once. What each has for itself is there for each.
    assert any("batch_normalization.moving_mean" in path for path in own)
    assert any("(replicas)" in path for path in own)
    assert not any("kernel" in path for path in own)


def test_a_stop_that_one_worker_is_asked_for_is_one_of_all_at_the_same_step(
    tmp_path: Path, expected: list[Any]
) -> None:
    trained = Trained(tmp_path).go(term=5)
    assert trained.codes == [75, 75], trained.said
    assert "stopped by signal SIGTERM on rank 1 at step 5, saved in step-00000005" in trained.said
    assert trained.go().codes == [0, 0], trained.said
    assert trained.seen() == expected


@pytest.mark.chaos
def test_what_is_damaged_for_one_worker_is_passed_over_by_all(tmp_path: Path, expected: list[Any]) -> None:
    trained = Trained(tmp_path).go(kill=7)
    newest = CheckpointStore(trained.run).latest()
    path = next(path for path in newest.manifest.tensors if path.startswith("ranks/1/"))
    entry = newest.manifest.tensors[path]
    flip(trained.run / layout.CHECKPOINTS / newest.name / entry.file, entry.offset)
    assert trained.go().codes == [0, 0], trained.said
    assert f"{newest.name} was passed over: rank 1: " in trained.said
    assert trained.seen() == expected


@pytest.mark.chaos
def test_a_worker_that_dies_ends_the_others_by_an_error_of_tensorflow(tmp_path: Path) -> None:
    trained = Trained(tmp_path).go(kill=4, left=True)
    assert trained.codes == [1, -9]
    assert "UnavailableError" in trained.said


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("option", "code", "found"),
    [
        ("torn", 78, "that model.dense.kernel differ from rank 0"),
        ("own", 78, "expected the directory of run"),
        ("lonely", 2, "expected all 2 workers to enter it, found that one does not"),
        ("fit", 78, "expected fit in one process, found 2 that train together"),
    ],
)
def test_what_would_tear_workers_apart_is_refused(tmp_path: Path, option: str, code: int, found: str) -> None:
    trained = Trained(tmp_path).go(**{option: True})
    assert trained.codes == [code, 0 if option == "lonely" else code], trained.said
    assert found in trained.said


@pytest.mark.chaos
@pytest.mark.parametrize("workers", [1, 3])
def test_shares_and_sums_of_two_workers_are_not_taken_for_those_of_others(
    tmp_path: Path, workers: int
) -> None:
    trained = Trained(tmp_path / "sums").go(kill=5)
    assert trained.go(workers=workers).codes == [78] * workers
    assert f"{workers} replicas, the checkpoint has a value of its own for each of 2 replicas" in trained.said
    # No one value is in the checkpoint that all of another number could begin with.
    assert trained.go(workers=workers, allow=["total.(replicas)"]).codes == [78] * workers
    trained = Trained(tmp_path / "shares").go(kill=5, without_sums=True)
    assert trained.go(workers=workers, without_sums=True).codes == [78] * workers
    assert f"shard.num_shards: the checkpoint has '2', found '{workers}'" in trained.said


@pytest.mark.chaos
def test_a_worker_that_waits_for_one_with_more_batches_says_so(tmp_path: Path) -> None:
    trained = Trained(tmp_path).go(short=20, left=True)
    # The other one waits in a sum of gradients, until this one is gone.
    assert trained.codes == [1, 2], trained.said
    assert "expected all 2 workers at the same place, found that worker 1 waited 20 s" in trained.said
    assert "give every worker as many batches" in trained.said


@pytest.mark.chaos
@pytest.mark.parametrize("workers", [1, 3])
def test_other_workers_go_on_between_epochs_of_data_that_carry_nothing_over(
    tmp_path: Path, workers: int
) -> None:
    options = {"in_order": True, "without_sums": True}
    assert Trained(tmp_path).go(epochs=1, **options).codes == [0, 0]
    trained = Trained(tmp_path).go(workers=workers, **options)
    assert trained.codes == [0] * workers, trained.said
    assert "(step 4, before epoch 1)" in trained.said
    assert f"unbroken: changed since: world_size: 2 -> {workers}" in trained.said


@pytest.mark.chaos
def test_under_a_supervisor_workers_are_started_again_by_themselves(
    tmp_path: Path, expected: list[Any]
) -> None:
    trained = Trained(tmp_path)
    trained.out.mkdir()
    keeping = ["unbroken.cli.main", "run", "--run-dir", str(trained.run), "--backoff", "0.01", "--"]
    training = [sys.executable, str(SCRIPT), str(trained.run), str(trained.out), "kill=3", "term=6"]
    done = subprocess.run(
        [sys.executable, "-m", *keeping, *training],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "TF_ENABLE_ONEDNN_OPTS": "0"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert trained.seen() == expected
    assert len([*trained.run.glob("attempts/*")]) == 3


def configuration(cluster: dict[str, list[str]], kind: str, index: int = 0) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


WORKERS = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}
SERVERS = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]}


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (
            configuration(WORKERS, "worker", 1),
            r"TF_CONFIG with 2 workers, of which this is worker 1, and no strategy",
        ),
        (
            configuration({"chief": ["a:1"], "worker": ["a:2"]}, "chief"),
            "2 workers, of which this is chief 0",
        ),
        (configuration(SERVERS, "worker"), "makes this worker 0 of a cluster with parameter servers"),
        (configuration(SERVERS, "ps"), "makes this ps 0 of a cluster with parameter servers"),
    ],
)
def test_who_cannot_speak_to_the_others_gets_no_run_and_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str, found: str
) -> None:
    monkeypatch.setenv("TF_CONFIG", config)
    with pytest.raises(UsageError, match=found), Run(tmp_path / "run", counts={"value": 0}):
        pass
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "config",
    [
        "",
        "{",
        configuration(SERVERS, "chief"),
        configuration({"worker": ["127.0.0.1:1"]}, "worker"),
        configuration({"chief": ["127.0.0.1:1"], "evaluator": ["127.0.0.1:2"]}, "chief"),
    ],
)
def test_who_trains_alone_or_coordinates_gets_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    monkeypatch.setenv("TF_CONFIG", config)
    with Run(tmp_path / "run", save=[], counts={"value": 0}) as run:
        run.step()
