"""Keras on another framework than TensorFlow: the same handlers, and the same exactness."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).with_name("backend_script.py")


@pytest.mark.chaos
def test_on_torch_a_model_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def play(directory: str, last: int) -> list[str]:
        environment = {**os.environ, "KERAS_BACKEND": "torch", "OMP_NUM_THREADS": "1"}
        found = subprocess.run(
            [sys.executable, str(_SCRIPT), str(tmp_path / directory), str(last)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert found.returncode == 0, found.stderr
        return found.stdout.splitlines()

    expected = play("whole", 6)
    play("parted", 3)
    assert play("parted", 6) == expected[3:]
    # Not the handler for modules of torch, which a model of Keras is there as well.
    manifest = next((tmp_path / "parted" / "checkpoints").glob("*6/manifest.json")).read_text()
    assert '"keras.model"' in manifest
