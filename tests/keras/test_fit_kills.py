"""model.fit in processes that kill -9 ends, at chosen steps."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ..zygote import run_script

SCRIPT = Path(__file__).with_name("fit_script.py")


def on_tensorflow(*arguments: str, output: Path) -> Any:
    return run_script(SCRIPT, *arguments, output=output, framework="tensorflow")


def on_torch(*arguments: str, output: Path) -> Any:
    command = [sys.executable, str(SCRIPT), *arguments]
    environment = {**os.environ, "KERAS_BACKEND": "torch"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def fit(
    directory: Path, kills: Sequence[int], start: Any = on_tensorflow
) -> tuple[dict[str, str], list[bytes], str]:
    """Return the loss of each step as it was last written, the state in the end, and the CSV file."""
    ledger = directory.with_suffix(".txt")
    for steps in (*kills, 0):
        output = directory.with_suffix(".out")
        ended = start(str(directory), str(ledger), str(steps), output=output)
        assert ended.returncode == (-9 if steps else 0), ended.stderr
    losses = dict(line.rsplit(" ", 1) for line in ledger.read_text().splitlines())
    with np.load(directory.with_suffix(".npz")) as state:
        arrays = [state[name].tobytes() for name in state.files]
    return losses, arrays, directory.with_suffix(".csv").read_text()


def test_a_fit_that_is_killed_ends_as_one_that_is_not(tmp_path: Path) -> None:
    assert fit(tmp_path / "killed", [7]) == fit(tmp_path / "whole", [])


@pytest.mark.chaos
def test_a_fit_that_is_killed_after_any_step_ends_as_one_that_is_not(tmp_path: Path) -> None:
    expected = fit(tmp_path / "whole", [])
    for steps in range(1, 13):
        # Near the end there may be no three steps left to be killed after.
        kills = [steps, 3] if steps + 3 <= 12 else [steps]
        assert fit(tmp_path / f"after-{steps}", kills) == expected


@pytest.mark.chaos
def test_keras_on_torch_goes_on_as_exactly(tmp_path: Path) -> None:
    assert fit(tmp_path / "killed", [5, 4], on_torch) == fit(tmp_path / "whole", [], on_torch)
