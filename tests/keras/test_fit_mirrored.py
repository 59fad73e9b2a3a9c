"""model.fit on several devices of one process: every copy of every variable goes on, to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .. import quiet_tensorflow  # noqa: F401 - first
from ..zygote import run_script
from .mirrored_fit import DATA, ORDERED, Ledger, Rows, X, Y, build, copies, fit

import keras  # isort: skip
import numpy as np  # isort: skip
import tensorflow as tf  # isort: skip

import unbroken  # isort: skip
from unbroken.errors import UnsupportedStateError  # isort: skip
from unbroken.integrations.keras.mirrored import shares  # isort: skip

SCRIPT = Path(__file__).with_name("mirrored_fit.py")


def strategy_of_two() -> Any:
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


class DiedError(Exception):
    """Stands for the end of a process."""


def die() -> None:
    raise DiedError


def trained(directory: Path | None, name: str, steps: int = 0, **options: Any) -> Any:
    """Return the logs of each step, the history and every copy in the end; die after some steps, if any."""
    ledger: dict[str, str] = {}
    model = build(**options)
    history = fit(directory, model, DATA[name](), Ledger(ledger, steps, die))
    return ledger, history, copies(model)


def test_a_fit_in_step_that_dies_has_the_bits_of_plain_fit_in_every_copy(tmp_path: Path) -> None:
    plain, history, expected = trained(None, "arrays")
    with pytest.raises(DiedError):
        trained(tmp_path, "arrays", 3)
    ledger, *found = trained(tmp_path, "arrays")
    assert found == [history, expected]
    assert ledger == {step: plain[step] for step in ledger}
    assert len(ledger) == 6, "from the checkpoint of the step before"


@pytest.mark.chaos
@pytest.mark.parametrize("name", DATA)
def test_every_kind_of_data_goes_on_with_the_next_batch_on_all_devices(tmp_path: Path, name: str) -> None:
    whole = trained(tmp_path / "whole", name)
    with pytest.raises(DiedError):
        trained(tmp_path / "broken", name, 3)
    ledger, *found = trained(tmp_path / "broken", name)
    assert found == list(whole[1:])
    assert ledger == {step: whole[0][step] for step in ledger}
    if name in ORDERED:
        assert trained(None, name) == whole


@pytest.mark.chaos
def test_several_steps_in_one_call_are_those_that_are_done_one_by_one(tmp_path: Path) -> None:
    together = {"steps_per_execution": 3}
    whole = trained(tmp_path / "whole", "arrays", **together)
    with pytest.raises(DiedError):
        trained(tmp_path / "broken", "arrays", 2, **together)
    ledger, *found = trained(tmp_path / "broken", "arrays", **together)
    assert found == list(whole[1:])
    assert ledger == {step: whole[0][step] for step in ledger}
    assert trained(None, "arrays")[2] == whole[2]


@pytest.mark.chaos
def test_a_killed_fit_in_step_ends_as_one_that_is_not(tmp_path: Path) -> None:
    def ended(name: str, directory: str, kills: list[int]) -> tuple[dict[str, str], str]:
        ledger = tmp_path / f"{name}.txt"
        for steps in (*kills, 0):
            arguments = (directory, str(ledger), str(steps), "a pipeline")
            done = run_script(SCRIPT, *arguments, output=tmp_path / "output", framework="tensorflow")
            assert done.returncode == (-9 if steps else 0), done.stderr
        losses = dict(line.split(": ", 1) for line in ledger.read_text().splitlines())
        return losses, Path(f"{ledger}.end").read_text()

    expected = ended("plain", "", [])
    assert ended("killed", str(tmp_path / "killed"), [3, 1, 4]) == expected


def test_a_batch_is_shared_out_as_tensorflow_does() -> None:
    strategy = strategy_of_two()
    for rows in (1, 5, 8):
        batch = tf.data.Dataset.range(rows).batch(8)
        (theirs,) = strategy.experimental_distribute_dataset(batch)
        mine = [np.arange(rows)[cut].tolist() for cut in shares(rows, 2)]
        assert mine == [copy.numpy().tolist() for copy in theirs.values]


def test_an_optimizer_that_the_first_batch_would_build_is_built_for_all_devices(tmp_path: Path) -> None:
    compiled = build()
    with strategy_of_two().scope():
        apart, optimizer = (
            keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]),
            keras.optimizers.Adam(),
        )
    with unbroken.Run(tmp_path / "compiled", model=compiled):
        pass
    with unbroken.Run(tmp_path / "apart", model=apart, optimizer=optimizer):
        pass
    for one in (compiled.optimizer, optimizer):
        assert {len(variable.value.values) for variable in one.variables} == {2}


def test_a_generator_is_refused_on_several_devices(tmp_path: Path) -> None:
    def batches() -> Iterator[Any]:
        for at in range(4):
            yield Rows()[at]

    with pytest.raises(UnsupportedStateError, match="a generator for a model on 2 devices"):
        fit(tmp_path, build(), {"x": batches(), "epochs": 1})


@pytest.mark.chaos
def test_sums_of_gradients_that_each_replica_has_for_itself_are_refused(tmp_path: Path) -> None:
    model = build(lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=3), run_eagerly=True)
    data = {"x": X, "y": Y, "batch_size": 4, "shuffle": False}
    with pytest.raises(UnsupportedStateError, match="gradient_accumulator of the optimizer, of which each"):
        fit(tmp_path, model, data)


@pytest.mark.chaos
def test_a_batch_of_no_numbers_is_left_out_on_all_devices(tmp_path: Path) -> None:
    bad = X.copy()
    bad[7] = np.nan
    model = build()
    health = unbroken.Health()
    data = {"x": bad, "y": Y, "batch_size": 4, "shuffle": False, "epochs": 1}
    history = fit(tmp_path, model, data, health=health)
    assert all(np.isfinite(values).all() for values in history.values())
    assert all(np.isfinite(keras.ops.convert_to_numpy(one)).all() for one in model.weights)
