"""The built wheel, in an environment that has nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from unbroken.checkpoint.store import CheckpointStore
from unbroken.rundir.identity import open_run

from ..checkpoint.states import snapshot_at

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(directory),
        str(ROOT),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = directory.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl"), "a pure Python wheel"
    subprocess.run([sys.executable, "-m", "venv", str(directory / "venv")], check=True)
    pip = [str(directory / "venv/bin/python"), "-m", "pip", "install", "--quiet"]
    subprocess.run(
        [*pip, "-c", str(ROOT / "constraints.txt"), str(wheel)], check=True, capture_output=True, timeout=200
    )
    return directory / "venv"


def test_the_command_line_works_without_torch_or_numpy(environment: Path, tmp_path: Path) -> None:
    run = tmp_path / "digits"
    open_run(run)
    for step in (1, 2):
        CheckpointStore(run).save(snapshot_at(step))

    def unbroken(*arguments: str) -> subprocess.CompletedProcess[str]:
        clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        return subprocess.run(
            [str(environment / "bin/unbroken"), *arguments],
            capture_output=True,
            text=True,
            check=False,
            env=clean,
            cwd=tmp_path,
        )

    absent = subprocess.run(
        [
            str(environment / "bin/python"),
            "-c",
            "import importlib.util as u; print(u.find_spec('torch'), u.find_spec('numpy'))",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert absent.stdout.split() == ["None", "None"]
    assert unbroken("--version").stdout.startswith("unbroken 0.")
    assert "step-00000002" in unbroken("ls", "digits").stdout
    assert "model" in unbroken("inspect", "digits").stdout
    assert unbroken("verify", "digits").returncode == 0
    path = run / "checkpoints/step-00000002/model-00.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    done = unbroken("verify", "digits")
    assert done.returncode == 3
    assert "model/bias" in done.stdout
