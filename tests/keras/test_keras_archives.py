"""`unbroken convert` writes `.keras`: `load_model` takes it, with every weight of the checkpoint."""

from __future__ import annotations

from .. import quiet_tensorflow  # noqa: F401  isort: skip

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import unbroken
from unbroken.cli.main import main
from unbroken.inspection.detect import open_checkpoint


@keras.saving.register_keras_serializable(package="unbroken_tests")
class Doubled(keras.Model):
    def __init__(self, units: int, **more: Any) -> None:
        super().__init__(**more)
        self.units = units
        self.first, self.second = keras.layers.Dense(units), keras.layers.Dense(units)
        self.scale = self.add_weight(shape=(), name="scale")

    def build(self, shape: Any) -> None:
        self.first.build(shape)
        self.second.build((*shape[:-1], self.units))
        self.built = True

    def call(self, inputs: Any) -> Any:
        return self.second(self.first(inputs)) * self.scale

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units}


def sequential() -> keras.Model:
    layers = [keras.layers.Dense(3, name="mine"), keras.layers.Dropout(0.5)]
    return keras.Sequential(
        [keras.Input((4,)), *layers, keras.layers.BatchNormalization(), keras.layers.Dense(2)]
    )


def functional() -> keras.Model:
    inputs = keras.Input((4,))
    shared = keras.layers.Dense(4)
    words = keras.layers.StringLookup(vocabulary=["a", "b"])
    named = keras.Input((1,), dtype="string")
    ids = keras.layers.Embedding(3, 4)(words(named))
    return keras.Model([inputs, named], shared(shared(inputs)) + keras.layers.GlobalAveragePooling1D()(ids))


def subclassed() -> keras.Model:
    model = Doubled(3)
    model.build((None, 4))
    return model


def filled(model: keras.Model, start: float) -> keras.Model:
    for number, variable in enumerate(model.weights):
        variable.assign(np.arange(np.prod(variable.shape)).reshape(variable.shape) + start + 10.0 * number)
    return model


def saved(directory: Path, model: keras.Model, **parts: Any) -> Path:
    with unbroken.Run(directory, model=model, **parts) as run:
        run.step(loss=1.0)
    return directory


def are_equal(one: keras.Model, other: keras.Model) -> bool:
    return all(map(np.array_equal, one.get_weights(), other.get_weights()))


def test_load_model_takes_what_was_written_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for build in (sequential, functional, subclassed):
        check(tmp_path / build.__name__, build, capsys)


def check(place: Path, build: Callable[[], keras.Model], capsys: pytest.CaptureFixture[str]) -> None:
    model, like = filled(build(), 1.0), build()
    for one in (model, like):
        one.compile(optimizer=keras.optimizers.Adam(0.25), loss="mse")
    run = saved(place / "run", model)
    like.save(place / "like.keras")
    command = ["convert", str(run), str(place / "out.keras"), "--like", str(place / "like.keras")]
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)

    with pytest.warns(UserWarning, match="Skipping variable loading for optimizer"):
        loaded = keras.saving.load_model(place / "out.keras")
    assert type(loaded) is type(model)
    assert len(loaded.weights) == len(model.weights) > 2
    assert are_equal(loaded, model)
    assert not are_equal(like, model)
    assert float(loaded.optimizer.learning_rate) == 0.25
    assert told["files"] == [str(place / "out.keras"), str(place / "out.json")]
    assert any("the optimizer has no state in it" in line for line in told["dropped"])
    assert any("no weights of the model lie below unbroken/" in line for line in told["dropped"])
    assert any("those of like.keras" in line for line in told["dropped"])
    reader = open_checkpoint(place / "out.keras")
    assert (reader.format, reader.problems, list(reader.verify())) == ("Keras .keras", [], [])
    with zipfile.ZipFile(place / "out.keras") as new, zipfile.ZipFile(place / "like.keras") as old:
        assert new.testzip() is None
        assert set(new.namelist()) == {name for name in old.namelist() if not name.endswith("/")}
        assert new.read("config.json") == old.read("config.json")
    again = [str(place / name) for name in ("out.keras", "again.keras")]
    assert main(["convert", *again, "--like", command[-1]]) == 0
    after = open_checkpoint(place / "again.keras")
    assert {name: bytes(reader.read(name)) for name in reader.tensors} == {
        name: bytes(after.read(name)) for name in after.tensors
    }
    capsys.readouterr()
    assert main(command) == 2
    assert "nothing is overwritten" in capsys.readouterr().err


def test_files_of_keras_become_one_another_with_the_state_of_the_optimizer(tmp_path: Path) -> None:
    model, like = filled(sequential(), 1.0), sequential()
    for one in (model, like):
        one.compile(optimizer=keras.optimizers.Adam(), loss="mse")
        one.optimizer.build(one.trainable_variables)
    for variable in model.optimizer.variables[2:]:
        variable.assign(keras.ops.full(variable.shape, 7.0))
    model.save_weights(tmp_path / "own.weights.h5")
    like.save(tmp_path / "like.keras")
    own, out, back = (str(tmp_path / name) for name in ("own.weights.h5", "out.keras", "back.weights.h5"))
    assert main(["convert", own, out, "--like", str(tmp_path / "like.keras")]) == 0
    assert main(["convert", out, back]) == 0

    loaded = keras.saving.load_model(out)
    assert are_equal(loaded, model)
    for mine, theirs in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        assert np.array_equal(mine, theirs)
    like.load_weights(back)
    assert are_equal(like, model)
    before, after = open_checkpoint(Path(own)), open_checkpoint(Path(back))
    assert {name: bytes(before.read(name)) for name in before.tensors} == {
        name: bytes(after.read(name)) for name in after.tensors
    }


def test_every_weight_that_is_not_alike_is_named_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = saved(tmp_path / "run", sequential())
    other = [keras.layers.Dense(5), keras.layers.BatchNormalization(), keras.layers.Dense(2, use_bias=False)]
    keras.Sequential([keras.Input((4,)), *other]).save(tmp_path / "like.keras")
    command = ["convert", str(run), str(tmp_path / "out.keras")]
    assert main([*command, "--like", str(tmp_path / "like.keras")]) == 2
    said = capsys.readouterr().err
    assert "layers/dense/vars/0: F32 4x5, the checkpoint has F32 4x3" in said
    assert "layers/batch_normalization/vars/3: F32 5, the checkpoint has F32 3" in said
    assert "layers/dense_1/vars/1: none, the checkpoint has F32 2" in said
    assert "layers/dense_1/vars/0: F32 5x2, the checkpoint has F32 3x2" in said

    assert main(command) == 2
    assert "model.save('like.keras')" in capsys.readouterr().err
    assert (
        main([*command[:2], str(tmp_path / "out.safetensors"), "--like", str(tmp_path / "like.keras")]) == 2
    )
    assert "expected no --like" in capsys.readouterr().err
    np.savez(tmp_path / "x.npz", a=np.ones(2))
    assert main(["convert", str(tmp_path / "x.npz"), command[2], "--like", str(tmp_path / "like.keras")]) == 2
    assert "expected a checkpoint of one model of Keras" in capsys.readouterr().err
    assert main([*command, "--like", str(tmp_path / "x.npz")]) == 2
    assert "expected a whole .keras file" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["like.keras", "run", "x.npz"]
