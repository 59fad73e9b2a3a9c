"""Whole runs of loops in TensorFlow: killed, resumed in fresh processes, and the same bit for bit."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import unbroken
from unbroken.errors import UsageError
from unbroken.testing.runs import compare_runs

from .. import quiet_tensorflow  # noqa: F401
from ..zygote import run_script
from .keeping import manifest

import tensorflow as tf  # isort: skip

SCRIPT = Path(__file__).with_name("loop_script.py")


def trained(directory: Path, *arguments: str) -> int:
    output = directory.parent / f"{directory.name}.out"
    ended = run_script(SCRIPT, str(directory), *arguments, output=output, framework="tensorflow")
    assert ended.returncode in (0, -signal.SIGKILL), ended.stderr
    return ended.returncode


def test_a_killed_run_goes_on_bit_for_bit_with_all_its_randomness(tmp_path: Path) -> None:
    assert trained(tmp_path / "whole") == 0
    assert trained(tmp_path / "killed", "--kill-at", "8") == -signal.SIGKILL
    assert manifest(tmp_path / "killed").step == 6
    assert trained(tmp_path / "killed") == 0
    assert manifest(tmp_path / "killed").step == 15
    assert manifest(tmp_path / "killed").parts["rng"].state.keys() >= {
        "python",
        "tensorflow",
        "keras",
        "held",
    }
    comparison = compare_runs(tmp_path / "whole", tmp_path / "killed")
    assert comparison.is_identical, comparison.differences


def test_losses_may_be_tensors_and_variables(tmp_path: Path) -> None:
    from unbroken.training.arguments import numbers

    given = {
        "tensor": tf.constant(0.5),
        "half": tf.constant([0.25], tf.bfloat16),
        "variable": tf.Variable(3, dtype=tf.int64),
        "array": np.float32(1.5),
    }
    assert numbers(given) == {"tensor": 0.5, "half": 0.25, "variable": 3, "array": 1.5}
    with pytest.raises(UsageError, match="metric 'loss': expected a number, found EagerTensor of shape"):
        numbers({"loss": tf.zeros(2)})
    with unbroken.Run(tmp_path, weight=tf.Variable(1.0)) as run:
        run.step(**given)


def test_the_surroundings_that_decide_the_bits_are_noted(tmp_path: Path) -> None:
    from unbroken.training.environment import is_hazard

    with unbroken.Run(tmp_path, weight=tf.Variable(1.0)) as run:
        run.step()
    found = manifest(tmp_path).environment
    assert found["tensorflow"] == tf.__version__
    assert found["tensorflow_threads"] == {"within_operations": 1, "between_operations": 1}
    assert len(found["tensorflow_devices"]) == len(tf.config.list_logical_devices())
    assert found["tensorflow_devices"][0] == "CPU:0"
    names = {name for name in found if name.startswith("tensor")} - {"tensorflow_memory_growth"}
    assert len(names) >= 10
    assert all(is_hazard(name) for name in names)


@pytest.mark.chaos
def test_the_drill_proves_a_loop_in_tensorflow(tmp_path: Path) -> None:
    drill = [
        sys.executable,
        "-P",
        "-m",
        "unbroken.cli.main",
        "drill",
        "--json",
        "--steps",
        "14",
        "--kills",
        "3",
    ]
    ended = subprocess.run(
        [*drill, "--", sys.executable, str(SCRIPT), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(ended.stdout)
    assert found["headline"].startswith("PROVEN: bit-identical over 3 kills")
    assert found["unkept"] == {}
