"""What fit may read, and that each goes on with the next batch, to the bits of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .fitting import DiedError, DiesAt, X, Y, build, is_same, run_of, state_of

import keras  # isort: skip
import numpy as np  # isort: skip
import tensorflow as tf  # isort: skip

import unbroken  # isort: skip


class Rows(keras.utils.PyDataset):
    """Batches by number."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return X[index * 5 : index * 5 + 5], Y[index * 5 : index * 5 + 5]


def noisy_batches(count: int) -> Iterator[tuple[Any, Any]]:
    """A generator that draws from the generator of the process."""
    for at in range(count):
        rows = slice(at % 4 * 5, at % 4 * 5 + 5)
        yield X[rows] + np.random.rand(5, 4).astype("float32"), Y[rows]


def pipeline() -> Any:
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(20, seed=3).batch(6)


DATA: dict[str, tuple[Callable[[], dict[str, Any]], int]] = {
    "shuffled arrays": (lambda: {"x": X, "y": Y, "batch_size": 6}, 8),
    # Four batches in a pass: the second epoch has the last one, and the third begins anew, as in plain fit.
    "arrays over epochs": (lambda: {"x": X, "y": Y, "batch_size": 6, "steps_per_epoch": 3, "epochs": 3}, 7),
    "arrays shuffled in batches": (lambda: {"x": X, "y": Y, "batch_size": 6, "shuffle": "batch"}, 8),
    "a PyDataset": (lambda: {"x": Rows()}, 8),
    "a pipeline": (lambda: {"x": pipeline()}, 8),
    "a pipeline over epochs": (lambda: {"x": pipeline().repeat(), "steps_per_epoch": 3}, 6),
    "a generator": (lambda: {"x": noisy_batches(7), "epochs": 1}, 7),
    "a generator over epochs": (lambda: {"x": noisy_batches(10), "steps_per_epoch": 3}, 6),
}
# What no other test reads in the ordinary suite.
SOON = ("arrays over epochs",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SOON else [pytest.mark.chaos]) for name in DATA]
)
def test_every_kind_of_data_goes_on_with_the_next_batch(tmp_path: Path, name: str) -> None:
    make, steps = DATA[name]

    def fit(directory: Path, dies: DiesAt) -> list[Any]:
        model = build()
        with run_of(directory, model) as run:
            options = {"epochs": 2, **make()}
            model.fit(verbose=0, callbacks=[dies, unbroken.keras.Checkpoint(run)], **options)
            assert run.step_count == steps
        return state_of(model)

    expected = fit(tmp_path / "whole", DiesAt())
    with pytest.raises(DiedError):
        fit(tmp_path / "broken", DiesAt("train_batch_end", 3))
    assert is_same(fit(tmp_path / "broken", DiesAt()), expected)


def test_each_epoch_has_another_order_and_every_row_once(tmp_path: Path) -> None:
    seen: list[float] = []

    class Watches(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, inputs: Any) -> Any:
            return self.dense(inputs)

        def train_step(self, data: Any) -> dict[str, Any]:
            seen.extend(data[1].numpy()[:, 0].tolist())
            return super().train_step(data)

    keras.utils.set_random_seed(1)
    model = Watches()
    model(X[:1])
    model.compile("sgd", "mse", run_eagerly=True)
    with run_of(tmp_path, model) as run:
        model.fit(X, Y, batch_size=6, epochs=2, verbose=0, callbacks=[unbroken.keras.Checkpoint(run)])
    first, second = seen[:20], seen[20:]
    assert sorted(first) == sorted(second) == sorted(Y[:, 0].tolist())
    assert first != second


@pytest.mark.chaos
@pytest.mark.parametrize(
    "options", [{"steps_per_execution": 3}, {"run_eagerly": True}, {"jit_compile": True}]
)
def test_fit_is_exact_however_its_steps_are_executed(tmp_path: Path, options: dict[str, Any]) -> None:
    def fit(directory: Path, dies: DiesAt) -> list[Any]:
        model = build(metrics=("mae",), **options)
        with run_of(directory, model) as run:
            used = [dies, unbroken.keras.Checkpoint(run)]
            model.fit(X, Y, batch_size=3, epochs=2, verbose=0, callbacks=used, shuffle=False)
        return state_of(model)

    plain = build(metrics=("mae",), **options)
    plain.fit(X, Y, batch_size=3, epochs=2, verbose=0, shuffle=False)
    with pytest.raises(DiedError):
        fit(tmp_path, DiesAt("train_batch_end", 2))
    assert is_same(fit(tmp_path, DiesAt()), state_of(plain))
