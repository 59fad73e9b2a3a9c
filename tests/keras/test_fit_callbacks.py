"""What callbacks hold: kept in the checkpoint, or told; and their files."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest

from .fitting import DiedError, DiesAt, X, Y, build, run_of

import keras  # isort: skip
import numpy as np  # isort: skip
import tensorflow as tf  # isort: skip

import unbroken  # isort: skip
from unbroken.errors import StateMismatchError, UnsupportedStateError  # isort: skip
from unbroken.integrations.keras.callback_state import KeptCallback, callback_differences  # isort: skip
from unbroken.integrations.keras.checkpoint import Checkpoint  # isort: skip
from unbroken.state.table import TensorTable  # isort: skip
from unbroken.state.tree import Encoder  # isort: skip
from unbroken.training import families  # isort: skip


class Holds(keras.callbacks.Callback):
    """Has one of everything that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.rows = 0, list[int]()
        self.array, self.tensor = np.zeros(2), tf.zeros(2)
        self.numpy, self.python = np.random.default_rng(1), random.Random(1)
        self.metric = keras.metrics.Mean()
        self.of_keras, self.of_tensorflow = keras.Variable(0.0), tf.Variable(0.0)

    def change(self) -> list[Any]:
        self.count += 1
        self.rows.append(self.count)
        self.array = self.array + 1
        self.tensor = self.tensor + 1
        self.metric.update_state(float(self.count))
        self.of_keras.assign_add(1.0)
        self.of_tensorflow.assign_add(1.0)
        return [
            *(self.count, list(self.rows), self.array.tolist(), self.tensor.numpy().tolist()),
            *(self.numpy.random(), self.python.random(), float(self.metric.result())),
            *(float(self.of_keras.numpy()), float(self.of_tensorflow.numpy())),
        ]


def test_all_that_is_kept_of_a_callback_comes_back_and_can_be_kept_again() -> None:
    one, other = Holds(), Holds()
    first, second = KeptCallback("Holds", one), KeptCallback("Holds", other)
    one.change()
    state = copy.deepcopy(first.state())
    second.restore(state)
    again = copy.deepcopy(second.state())
    third = Holds()
    KeptCallback("Holds", third).restore(again)
    assert one.change() == other.change() == third.change()
    assert isinstance(other.of_tensorflow, tf.Variable)
    Encoder(TensorTable(), families.codecs()).encode(again, "callback")


def test_what_cannot_be_kept_of_a_callback_is_told_once_by_its_name(
    capfd: pytest.CaptureFixture[str],
) -> None:
    callback = Holds()
    callback.nested = {"rows": [], "variable": tf.Variable(0.0)}
    callback.model_of_another, callback.function = build(), print
    kept = KeptCallback("Holds", callback)
    kept.state()
    kept.state()
    told = [line for line in capfd.readouterr().err.splitlines() if "cannot be kept" in line]
    assert len(told) == 1
    assert "Holds.nested, a dict," in told[0]


def test_another_kind_of_object_than_was_kept_is_refused() -> None:
    other = Holds()
    kept = KeptCallback("Holds", other)
    other.numpy = None  # type: ignore[assignment]
    with pytest.raises(StateMismatchError, match=r"fit\.Holds\.numpy: expected .* found a NoneType"):
        kept.restore(KeptCallback("Holds", Holds()).state())


def stopping(**options: Any) -> Any:
    return keras.callbacks.EarlyStopping("loss", mode="min", **options)


def test_a_setting_that_keras_turns_around_is_the_scripts() -> None:
    saved, found = stopping(min_delta=0.5), stopping(min_delta=0.001)
    kept, now = KeptCallback("EarlyStopping", saved), KeptCallback("EarlyStopping", found)
    saved._set_monitor_op()
    state = kept.state()
    now.restore(state)
    assert found.min_delta == -0.001
    assert "min_delta=0.001 of the script is used" in now.changed_settings(state)[0]


def test_a_setting_that_has_come_to_something_else_in_the_checkpoint_is_told() -> None:
    saved, found = stopping(), stopping()
    saved.patience, found.patience = 3, 7
    kept, now = KeptCallback("EarlyStopping", saved), KeptCallback("EarlyStopping", found)
    saved.patience = 9
    state = kept.state()
    now.restore(state)
    assert found.patience == 9
    assert "patience=7 of the script is not used" in now.changed_settings(state)[0]


def test_another_order_of_the_callbacks_is_refused_with_both() -> None:
    one, other = KeptCallback("One", Holds()), KeptCallback("Other", Holds())
    found = callback_differences([one, other], {"Other": other.state(), "One": one.state()})
    assert "One, Other, the checkpoint has them as Other, One" in found[0].text


@pytest.mark.chaos
def test_a_refused_resume_leaves_a_csv_file_as_it_is_and_one_that_goes_on_has_each_row_once(
    tmp_path: Path,
) -> None:
    file = tmp_path / "log.csv"

    def fit(*others: Any, **options: Any) -> None:
        model = build()
        with run_of(tmp_path / "run", model, allow=["fit.DiesAt"], save=[unbroken.EverySteps(2)]) as run:
            use = [keras.callbacks.CSVLogger(str(file)), *others, unbroken.keras.Checkpoint(run)]
            model.fit(X, Y, **{"batch_size": 10, "epochs": 4, "verbose": 0, **options, "callbacks": use})

    with pytest.raises(DiedError):
        fit(DiesAt("train_batch_end", 7))
    file.write_text(file.read_text() + "behind,the checkpoint\n")
    before = file.read_bytes()
    with pytest.raises(StateMismatchError):
        fit(keras.callbacks.TerminateOnNaN())
    with pytest.raises(StateMismatchError):
        fit(batch_size=5)
    assert file.read_bytes() == before
    fit()
    assert [row.split(",")[0] for row in file.read_text().splitlines()] == ["epoch", "0", "1", "2", "3"]


def test_a_csv_logger_of_which_nobody_tells_before_it_begins_is_refused(tmp_path: Path) -> None:
    model = build()
    with run_of(tmp_path / "run", model) as run:
        use = [keras.callbacks.CSVLogger(str(tmp_path / "log.csv")), Checkpoint(run)]
        silent = keras.callbacks.CallbackList(use, model=model)
        with pytest.raises(UnsupportedStateError, match="a CSVLogger in a CallbackList"):
            model.fit(X, Y, verbose=0, callbacks=silent)
