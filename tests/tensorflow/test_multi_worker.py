"""Several workers that train together: no run is made that would go on from two different steps."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from unbroken import Run
from unbroken.errors import UsageError

from .. import quiet_tensorflow  # noqa: F401

SCRIPT = Path(__file__).with_name("multi_worker_script.py")
PATIENCE_SECONDS = 240


def configuration(cluster: dict[str, list[str]], kind: str, index: int = 0) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


WORKERS = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}
SERVERS = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]}


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (configuration(WORKERS, "worker", 1), r"TF_CONFIG with 2 workers, of which this is worker 1"),
        (
            configuration({"chief": ["a:1"], "worker": ["a:2"]}, "chief"),
            "2 workers, of which this is chief 0",
        ),
        (configuration(SERVERS, "worker"), "makes this worker 0 of a cluster with parameter servers"),
        (configuration(SERVERS, "ps"), "makes this ps 0 of a cluster with parameter servers"),
    ],
)
def test_one_of_several_workers_gets_no_run_and_no_directory(
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


@pytest.mark.chaos
@pytest.mark.parametrize("told_by", ["TF_CONFIG", "resolver"])
def test_two_real_workers_are_refused_before_either_waits_for_the_other(tmp_path: Path, told_by: str) -> None:
    cluster = {"worker": [free_address(), free_address()]}
    workers = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(tmp_path / f"{index}"), told_by],
            env={
                **os.environ,
                "CLUSTER": configuration(cluster, "worker", index),
                "TF_CPP_MIN_LOG_LEVEL": "3",
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        ends = [worker.communicate(timeout=PATIENCE_SECONDS)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    for index, (worker, said) in enumerate(zip(workers, ends, strict=True)):
        assert worker.returncode == 2, said
        assert f"2 workers, of which this is worker {index}" in said
        assert not (tmp_path / f"{index}").exists()


def free_address() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{taken.getsockname()[1]}"
