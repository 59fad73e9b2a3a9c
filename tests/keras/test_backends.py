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


def play(backend: str, directory: Path, how: str, last: int, *more: str, ends_by: int = 0) -> list[str]:
    environment = {
        "KERAS_BACKEND": backend,
        "OMP_NUM_THREADS": "1",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    found = subprocess.run(
        [sys.executable, str(_SCRIPT), str(directory), how, str(last), *more],
        env={**os.environ, **environment},
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


@pytest.mark.parametrize("backend", ["tensorflow", *BACKENDS])
def test_a_fit_that_is_killed_ends_as_one_that_is_not(backend: str, tmp_path: Path) -> None:
    expected = play(backend, tmp_path / "whole", "fit", -1)
    # The second time behind the last batch of an epoch, before its validation is made.
    for batch in (5, 10, 17):
        play(backend, tmp_path / "killed", "fit", batch, ends_by=-signal.SIGKILL)
    assert play(backend, tmp_path / "killed", "fit", -1) == expected


def test_over_several_devices_of_jax_a_fit_is_the_same_and_goes_on(tmp_path: Path) -> None:
    expected = play("jax", tmp_path / "none", "fit", -1, "plain")
    assert play("jax", tmp_path / "whole", "fit", -1, "shared") == expected
    play("jax", tmp_path / "killed", "fit", 7, "shared", ends_by=-signal.SIGKILL)
    assert play("jax", tmp_path / "killed", "fit", -1, "shared") == expected
