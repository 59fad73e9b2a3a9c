"""What is kept of the surroundings of a run, and of the repository that its script lies in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import unbroken
from unbroken.checkpoint.store import CheckpointStore
from unbroken.training.environment import HAZARDS, VARIABLES, changes, environment, is_hazard
from unbroken.training.repository import repository


@pytest.fixture(autouse=True)
def _plain_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "RANK", "WORLD_SIZE", "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    # Nothing of the user's own settings.
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")


def git(place: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=Test", "-c", "user.email=test@example.org")
    command = ["git", "-C", str(place), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    place = tmp_path / "project"
    (place / "src").mkdir(parents=True)
    git(place, "init", "-q", "-b", "trunk")
    (place / "src" / "train.py").write_text("rate = 0.1\n")
    (place / "notes.txt").write_text("first\n")
    git(place, "add", ".")
    git(place, "commit", "-q", "-m", "first")
    return place


def asked(place: Path, **options: Any) -> dict[str, Any]:
    found = repository([place], **options)
    assert found is not None
    return found


def test_the_commit_and_the_branch_are_those_of_the_repository_that_holds_the_place(project: Path) -> None:
    assert asked(project / "src") == {
        "commit": git(project, "rev-parse", "HEAD"),
        "branch": "trunk",
        "dirty": False,
        "changes": None,
    }
    git(project, "checkout", "-q", "--detach")
    assert asked(project)["branch"] is None


def test_the_first_place_that_is_in_a_repository_counts(project: Path, tmp_path: Path) -> None:
    assert repository([tmp_path, project]) == asked(project)
    assert repository([tmp_path]) is None
    assert repository([]) is None


def test_two_states_that_are_not_committed_are_told_apart_and_each_is_known_again(project: Path) -> None:
    train = project / "src" / "train.py"
    train.write_text("rate = 0.2\n")
    first = asked(project)
    assert first["dirty"] is True
    train.write_text("rate = 0.3\n")
    second = asked(project)
    assert second["changes"] != first["changes"]
    # Staged or not, from wherever it is asked, whatever the user likes to see.
    train.write_text("rate = 0.2\n")
    git(project, "add", ".")
    for key, value in (
        ("noprefix", "true"),
        ("context", "9"),
        ("algorithm", "patience"),
        ("relative", "true"),
    ):
        git(project, "config", f"diff.{key}", value)
    assert asked(project / "src") == first
    git(project, "reset", "-q", "--hard")
    assert asked(project)["dirty"] is False


def test_a_changed_binary_file_is_told_by_its_bytes(project: Path) -> None:
    (project / "notes.txt").write_bytes(b"\0" * 1000)
    first = asked(project)
    (project / "notes.txt").write_bytes(b"\0" * 999 + b"\1")
    assert asked(project)["changes"] != first["changes"]


def test_files_that_git_does_not_track_make_nothing_dirty(project: Path) -> None:
    (project / "checkpoint.bin").write_bytes(b"data")
    assert asked(project)["dirty"] is False


def test_a_file_named_like_a_revision_confuses_nobody(project: Path) -> None:
    (project / "HEAD").write_text("not a revision\n")
    assert asked(project)["dirty"] is False


def test_without_git_or_without_a_commit_there_is_nothing_to_tell(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    git(tmp_path / "empty", "init", "-q")
    assert repository([tmp_path / "empty"]) is None
    (project / ".git" / "HEAD").write_text("damaged")
    assert repository([project]) is None
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert repository([project]) is None


def test_variables_that_lead_git_elsewhere_are_not_followed(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other.git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path))
    found = asked(project)
    monkeypatch.delenv("GIT_DIR")
    monkeypatch.delenv("GIT_WORK_TREE")
    assert found["commit"] == git(project, "rev-parse", "HEAD")


def test_nothing_of_the_repository_is_run_and_nothing_is_written(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "was-run"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {mark}\n")
    program.chmod(0o755)
    (project / ".gitattributes").write_text("*.py diff=odd\n")
    git(project, "add", ".")
    git(project, "commit", "-q", "-m", "second")
    for key in ("core.fsmonitor", "diff.external", "diff.odd.command", "diff.odd.textconv", "core.pager"):
        git(project, "config", key, str(program))
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", str(program))
    (project / "src" / "train.py").write_text("rate = 0.2\n")
    # As it is, but newer: git would like to note that it looked.
    os.utime(project / "notes.txt", (1, 1))
    before = {path: path.read_bytes() for path in (project / ".git").rglob("*") if path.is_file()}
    assert asked(project)["dirty"] is True
    assert not mark.exists()
    assert {path: path.read_bytes() for path in (project / ".git").rglob("*") if path.is_file()} == before


def test_a_repository_that_takes_too_long_delays_nobody_and_leaves_nothing_running(
    project: Path, tmp_path: Path
) -> None:
    running = tmp_path / "running"
    (project / ".gitattributes").write_text("*.txt filter=slow\n")
    git(project, "add", ".")
    git(project, "commit", "-q", "-m", "second")
    git(project, "config", "filter.slow.clean", f"echo $$ > {running}; exec sleep 600")
    (project / "notes.txt").write_text("other\n")
    began = time.monotonic()
    found = asked(project, budget_seconds=1.0)
    assert time.monotonic() - began < 10
    assert found == {
        "commit": git(project, "rev-parse", "HEAD"),
        "branch": "trunk",
        "dirty": None,
        "changes": None,
    }
    process = int(running.read_text())
    deadline = time.monotonic() + 10
    while _lives(process) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _lives(process)


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def printed(directory: Path) -> dict[str, Any]:
    """Return what a fresh process without any framework finds."""
    script = directory / "train.py"
    script.write_text(
        "import json\n"
        "from unbroken.training.environment import environment\n"
        "print(json.dumps(environment()))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script), "--rate", "0.1"],
        cwd=directory,
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_environment_is_the_same_in_the_next_process_and_loads_no_framework(tmp_path: Path) -> None:
    first = printed(tmp_path)
    assert first == printed(tmp_path)
    assert first["command"] == [str(tmp_path / "train.py"), "--rate", "0.1"]
    assert first["directory"] == str(tmp_path)
    assert (first["rank"], first["world_size"], first["variables"]) == (0, 1, {})
    assert first["processor"]
    assert not {"torch", "numpy"} & set(first)


def test_everything_that_may_change_the_bits_is_recorded_as_plain_data() -> None:
    found = environment()
    json.dumps(found, allow_nan=False)
    assert set(found) >= {name.partition(".")[0] for name in HAZARDS} - {"tensorflow", "keras"}


@pytest.fixture
def _torch_as_it_was() -> Iterator[None]:
    cudnn = torch.backends.cudnn
    flags = (cudnn.benchmark, cudnn.deterministic)
    dtype, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    yield
    cudnn.benchmark, cudnn.deterministic = flags
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_torch_as_it_was")
def test_what_torch_is_told_shows() -> None:
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = True
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("high")
    found: Any = environment()
    names = ("torch_threads", "deterministic_algorithms", "cudnn_benchmark", "cudnn_deterministic")
    assert [found[name] for name in names] == [1, True, True, True]
    assert (found["default_dtype"], found["float32_matmul_precision"]) == ("torch.float64", "high")
    assert {"tf32", True} & {*found["float32_precision"].values()}


def test_a_process_group_knows_its_place_better_than_the_variables_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    store = torch.distributed.FileStore(str(tmp_path / "group"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        found = environment()
    finally:
        torch.distributed.destroy_process_group()
    assert (found["rank"], found["world_size"]) == (0, 1)


def test_precisions_set_in_the_newer_terms_of_torch_are_told_in_those() -> None:
    matmul: Any = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("this torch has the older terms only")
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        found: Any = environment()
    finally:
        matmul.fp32_precision = before
    assert found["float32_precision"]["cuda.matmul"] == "tf32"


def test_variables_and_the_place_among_processes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"OMP_NUM_THREADS": "3", "SECRET": "x", "RANK": "2", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    found = environment()
    assert found["variables"] == {"OMP_NUM_THREADS": "3"}
    assert (found["rank"], found["world_size"]) == (2, 4)


def test_odd_words_and_a_directory_that_is_gone_stop_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr("sys.argv", ["-c", "\udcff"])
    monkeypatch.setenv("RANK", "first")
    monkeypatch.setenv("XLA_FLAGS", "\udcff")
    found = environment()
    assert (found["directory"], found["rank"], found["git"]) == (None, 0, None)
    assert (found["command"], found["variables"]) == (["-c", r"\udcff"], {"XLA_FLAGS": r"\udcff"})


def test_changes_that_may_change_the_bits_come_first() -> None:
    then = {
        "host": "a",
        "torch": "2.12",
        "variables": {},
        "git": {"commit": "1", "branch": "x", "changes": None},
        "command": ["a"],
    }
    now = {
        "host": "b",
        "torch": "2.13",
        "variables": {"OMP_NUM_THREADS": "2"},
        "git": {"commit": "2", "branch": "y", "changes": None},
        "command": ["b"],
        "recorded": "since a newer release",
    }
    assert [(change.name, is_hazard(change.name)) for change in changes(then, now)] == [
        ("git.commit", True),
        ("torch", True),
        ("variables.OMP_NUM_THREADS", True),
        ("command", False),
        ("git.branch", False),
        ("host", False),
    ]
    assert not is_hazard("variables.PYTORCH_CUDA_ALLOC_CONF")


def test_a_run_keeps_its_environment(tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setattr("sys.argv", ["-c"])
    with unbroken.Run(tmp_path / "r", values={"a": 1}) as run:
        run.step()
    kept = CheckpointStore(tmp_path / "r").latest().manifest.environment
    assert kept["git"] == asked(project)
    assert kept["directory"] == str(project)
    assert kept == environment()
