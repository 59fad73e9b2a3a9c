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
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter  # isort: skip

import unbroken  # isort: skip
from unbroken.errors import UnsupportedStateError  # isort: skip
from unbroken.frameworks.keras.fit_data import OneStream  # isort: skip
from unbroken.integrations.keras.data import fit_data, looks_of, tell_of_validation  # isort: skip


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


@pytest.mark.chaos
@pytest.mark.parametrize("name", DATA)
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


class Shuffled(Rows):
    """Batches in an order of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.order = np.arange(20)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        rows = self.order[index * 5 : index * 5 + 5]
        return X[rows], Y[rows]

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.order)


class Drawn(Rows):
    """Batches with noise from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = np.random.default_rng(1)


def test_a_pydataset_that_changes_and_is_no_part_and_sparse_arrays_are_refused(tmp_path: Path) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    model = build()
    with run_of(tmp_path, model) as run:
        for data, text in [
            ({"x": Shuffled()}, "a Shuffled with an on_epoch_end"),
            ({"x": Drawn()}, "a Drawn with the random generator 'noise'"),
            ({"x": sparse.csr_matrix(X), "y": Y}, "expected dense arrays, found one of class csr_matrix"),
        ]:
            with pytest.raises(UnsupportedStateError, match=text):
                model.fit(verbose=0, callbacks=[unbroken.keras.Checkpoint(run)], **data)


def test_a_generator_has_the_batches_in_its_place_that_were_drawn_before_the_fit() -> None:
    def stream(first: list[Any]) -> OneStream:
        return OneStream(first, iter([(X[10:], None)]), {}, None)

    there, here = stream([(X[:5], None), (X[5:10], None)]), stream([(Y[:5], None), (Y[5:10], None)])
    there.begin_epoch()
    there.next_batch()
    here.go_to(there.position())
    rest = list(here.rest_of_epoch())
    assert np.array_equal(rest[0][0], X[5:10])
    assert rest[0][1] is None
    assert np.array_equal(rest[1][0], X[10:])


def test_a_pydataset_of_another_class_is_other_data() -> None:
    def looks(dataset: Any) -> Any:
        return looks_of(fit_data(PyDatasetAdapter(dataset, None), None))

    assert looks(Rows()) == looks(Rows()) != looks(Drawn())


def test_validation_data_that_begin_anew_in_a_resume_are_told(capfd: pytest.CaptureFixture[str]) -> None:
    tell_of_validation((X, {"a": tf.constant(Y)}, None))
    tell_of_validation(Rows())
    assert not capfd.readouterr().err
    for data in (pipeline(), noisy_batches(3), Drawn()):
        tell_of_validation(data)
        assert "have no place in a checkpoint" in capfd.readouterr().err


@pytest.mark.chaos
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_generator_that_draws_goes_on_exactly_from_its_first_batches(tmp_path: Path, at: int) -> None:
    def fit(directory: Path, dies: DiesAt) -> list[Any]:
        model = build()
        with run_of(directory, model) as run:
            model.fit(noisy_batches(5), verbose=0, callbacks=[dies, unbroken.keras.Checkpoint(run)])
        return state_of(model)

    expected = fit(tmp_path / "whole", DiesAt())
    with pytest.raises(DiedError):
        fit(tmp_path / "broken", DiesAt("train_batch_end", at))
    assert is_same(fit(tmp_path / "broken", DiesAt()), expected)


@pytest.mark.chaos
def test_a_pydataset_with_an_order_of_its_own_goes_on_exactly_as_a_part(tmp_path: Path) -> None:
    def fit(directory: Path, dies: DiesAt) -> list[Any]:
        model, data = build(), Shuffled()
        with run_of(directory, model, data=data) as run:
            use = [dies, unbroken.keras.Checkpoint(run)]
            model.fit(data, epochs=3, shuffle=False, verbose=0, callbacks=use)
        return state_of(model)

    expected = fit(tmp_path / "whole", DiesAt())
    with pytest.raises(DiedError):
        fit(tmp_path / "broken", DiesAt("train_batch_end", 7))
    assert is_same(fit(tmp_path / "broken", DiesAt()), expected)


class Autoencoder(keras.Model):
    """A model with steps of its own and without a call()."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        self.decoder = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4)])
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.decoder(self.encoder(data)) - data) ** 2)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


@pytest.mark.chaos
def test_a_model_with_steps_of_its_own_and_without_a_call_goes_on_inside_an_epoch(tmp_path: Path) -> None:
    def fit(directory: Path, dies: DiesAt) -> list[Any]:
        keras.utils.set_random_seed(1)
        model = Autoencoder()
        model.compile(keras.optimizers.Adam(0.1), jit_compile=False)
        with run_of(directory, model) as run:
            use = [dies, unbroken.keras.Checkpoint(run)]
            model.fit(X, batch_size=5, epochs=2, verbose=0, callbacks=use)
        return state_of(model)

    expected = fit(tmp_path / "whole", DiesAt())
    with pytest.raises(DiedError):
        fit(tmp_path / "broken", DiesAt("train_batch_end", 3))
    assert is_same(fit(tmp_path / "broken", DiesAt()), expected)
