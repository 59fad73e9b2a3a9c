"""Keras on another framework than TensorFlow: the same handlers, and the same exactness."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).with_name("backend_script.py")
BACKENDS = ["torch", "jax"]
# Each process imports two frameworks and compiles for one of them.
pytestmark = pytest.mark.chaos


def play(backend: str, directory: Path, how: str, last: int, *, ends_by: int = 0) -> list[str]:
    found = subprocess.run(
        [sys.executable, str(_SCRIPT), str(directory), how, str(last)],
        env={**os.environ, "KERAS_BACKEND": backend, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == ends_by, found.stderr
    return found.stdout.splitlines()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_goes_on_bit_for_bit(backend: str, tmp_path: Path) -> None:
    expected = play(backend, tmp_path / "whole", "steps", 6)
    play(backend, tmp_path / "parted", "steps", 3)
    assert play(backend, tmp_path / "parted", "steps", 6) == expected[3:]
    # Not the handler for modules of torch, which a model of Keras is there as well.
    manifest = next((tmp_path / "parted" / "checkpoints").glob("*6/manifest.json")).read_text()
    assert '"keras.model"' in manifest


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_fit_that_is_killed_twice_ends_as_one_that_is_not(backend: str, tmp_path: Path) -> None:
    expected = play(backend, tmp_path / "whole", "fit", -1)
    for batch in (4, 17):
        play(backend, tmp_path / "killed", "fit", batch, ends_by=-signal.SIGKILL)
    assert play(backend, tmp_path / "killed", "fit", -1) == expected
