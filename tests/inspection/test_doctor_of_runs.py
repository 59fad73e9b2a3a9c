"""`unbroken doctor RUN`: beside the checkpoint it looks at the run, its disk and this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unbroken.checkpoint.store import CheckpointStore
from unbroken.cli.main import main
from unbroken.cli.readiness import advise_on_machine
from unbroken.rundir import layout
from unbroken.rundir.identity import open_run
from unbroken.storage.base import TEMPORARY_PREFIX
from unbroken.supervisor.host.machine import Machine, look

from ..checkpoint.states import snapshot_at

PLAIN = Machine(
    shared_memory_bytes=1 << 30,
    versions={"torch": "2.13.0+cpu"},
    has_gpus=False,
    has_py_spy=True,
    may_trace=True,
    user="somebody",
    ends_with_login=False,
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    open_run(directory)
    store = CheckpointStore(directory)
    for step in (1, 2, 3):
        store.save(snapshot_at(step))
    return directory


def asked(run: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    main(["doctor", str(run), "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def texts(found: dict[str, Any]) -> str:
    return "\n".join(f"{one['severity']}: {one['text']} ({one['evidence']})" for one in found["advice"])


def test_its_disk_is_tried_out_and_left_as_it_was(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(run.rglob("*"))
    found = asked(run, capsys)
    assert (found["disk"]["directory"], found["disk"]["locks"]) == (str(run), "hold")
    assert sorted(run.rglob("*")) == before
    main(["doctor", str(run)])
    assert "its disk: " in capsys.readouterr().out


def test_what_stands_beside_the_newest_is_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "older ones" not in texts(asked(run, capsys))
    CheckpointStore(run).quarantine("step-00000001", "its tensors were damaged")
    manifest = run / layout.CHECKPOINTS / "step-00000002" / layout.MANIFEST
    manifest.chmod(0o600)
    manifest.write_bytes(manifest.read_bytes()[:-1])
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for process_id in (ended.pid, os.getpid()):
        (run / layout.CHECKPOINTS / f"{TEMPORARY_PREFIX}{process_id}-half").mkdir()
    said = texts(asked(run, capsys))
    assert "warning: 1 of the 1 older ones are of no use, should this one be damaged (step-00000002:" in said
    assert "warning: 1 checkpoints were set aside: nothing resumes from them (step-00000001: its tens" in said
    assert "note: 1 saves did not end, and what they wrote takes up space" in said


def test_a_run_where_nothing_can_be_written_cannot_go_on(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any, **__: Any) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkdtemp", refuses)
    found = asked(run, capsys)
    assert found["disk"] is None
    assert "error: nothing can be written where the run is" in texts(found)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shared_memory_bytes": 64 << 20}, "shared memory has 67 MB"),
        ({"versions": {"torch": "2.12.0"}}, "torch 2.13.0+cpu made it, and 2.12.0 is installed here"),
        ({"ends_with_login": True}, "may end with your last login"),
        ({"may_trace": False}, "py-spy is installed, and may not look"),
    ],
)
def test_what_is_in_the_way_on_this_machine_is_one_advice(changes: dict[str, Any], words: str) -> None:
    environment: dict[str, Any] = {"torch": "2.13.0+cpu", "cuda": None, "devices": []}
    assert advise_on_machine(PLAIN, environment) == []
    (one,) = advise_on_machine(replace(PLAIN, **changes), environment)
    assert words in one.text


def test_a_gpu_that_is_gone_is_told() -> None:
    environment = {"cuda": "13.0", "devices": ["NVIDIA H100"]}
    (one,) = advise_on_machine(PLAIN, environment)
    assert "trained on a GPU" in one.text
    assert advise_on_machine(replace(PLAIN, has_gpus=True), environment) == []


def test_this_machine_is_looked_at_without_loading_a_framework() -> None:
    code = "import sys; from unbroken.supervisor.host.machine import look; look(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "tensorflow"} & set(done.stdout.split())
    assert look().versions["torch"]
