"""Weights in files of Keras and TensorFlow go into models of every framework, all of them or none."""

from __future__ import annotations

from .. import quiet_tensorflow  # noqa: F401  isort: skip

import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

import unbroken
from unbroken.cli.main import main
from unbroken.errors import DamagedError, StateMismatchError, StorageError, UsageError
from unbroken.training.warm_sources import is_kept_for_training

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def build(units: int = 3, *, seed: int = 0, first: str | None = None) -> keras.Model:
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(units, name=first),
            keras.layers.Dropout(0.5),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(2),
        ]
    )


class Affine(tf.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.kernel = tf.Variable(tf.fill((4, 2), value))
        self.bias = tf.Variable(tf.fill((2,), value))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with one model, trained a little, in every format."""
    directory = tmp_path_factory.mktemp("source")
    model = build(seed=1)
    for number, variable in enumerate(model.weights):
        variable.assign(np.arange(np.prod(variable.shape)).reshape(variable.shape) + 10.0 * number)
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    model.save_weights(directory / "x.weights.h5")
    model.save(directory / "x.keras")
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, step=tf.Variable(7))
    checkpoint.save(str(directory / "bundle/ckpt"))
    np.savez(directory / "expected.npz", *model.get_weights())
    return directory


def expected(source: Path) -> list[np.ndarray]:
    found = np.load(source / "expected.npz")
    return [found[name] for name in found]


def weights_equal(model: keras.Model, values: list[np.ndarray]) -> bool:
    return all(map(np.array_equal, model.get_weights(), values))


def test_a_keras_model_takes_its_weights_by_structure_whatever_its_layers_are_called(source: Path) -> None:
    # Keras has numbered the layers of this one on.
    model = build()
    before = model.get_weights()
    for name in ("x.weights.h5", "x.keras", "bundle", "bundle/ckpt-1"):
        model.set_weights(before)
        report = unbroken.warm_start(model, source / name)
        assert weights_equal(model, expected(source)), name
        assert report.matched.tensors == 8


def test_a_legacy_file_is_taken_with_a_map_of_its_names(tmp_path: Path) -> None:
    def two(name: str, *names: str | None) -> keras.Model:
        layers = [keras.layers.Dense(2, name=name) for name in names]
        return keras.Sequential([keras.Input((2,)), *layers], name=name)

    keras.utils.set_random_seed(0)
    old, new = two("small", "one", "other"), two("large", None, None)
    old.save(tmp_path / "x.h5")
    with pytest.raises(StateMismatchError, match="nothing was changed"):
        unbroken.warm_start(new, tmp_path / "x.h5")
    unbroken.warm_start(new, tmp_path / "x.h5", rename={"small.one": "dense", "small.other": "dense_1"})
    assert weights_equal(new, old.get_weights())


@pytest.mark.parametrize("name", ["bundle", pytest.param("x.weights.h5", marks=pytest.mark.chaos)])
def test_it_is_strict_in_both_directions_and_changes_nothing(source: Path, name: str) -> None:
    other = build(5)
    before = other.get_weights()
    with pytest.raises(
        StateMismatchError, match=r"dense\.kernel: shape \(4, 5\), the source has shape \(4, 3\)"
    ):
        unbroken.warm_start(other, source / name)
    fewer = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    with pytest.raises(StateMismatchError, match="the model lacks it"):
        unbroken.warm_start(fewer, source / name)
    more = keras.Sequential([*build().layers, keras.layers.Dense(2)])
    more.build((None, 4))
    with pytest.raises(StateMismatchError, match=r"dense_2\.kernel: the source lacks it"):
        unbroken.warm_start(more, source / name)
    assert weights_equal(other, before)
    report = unbroken.warm_start(more, source / name, allow=["dense_2.*"])
    assert [item.name for item in report.allowed] == ["dense_2.kernel", "dense_2.bias"]


def test_a_dtype_is_converted_on_request_alone(source: Path) -> None:
    model = build()
    half = keras.models.clone_model(
        model,
        clone_function=lambda layer: layer.__class__.from_config({**layer.get_config(), "dtype": "float64"}),
    )
    with pytest.raises(StateMismatchError, match="dtype float64, the source has dtype float32"):
        unbroken.warm_start(half, source / "x.weights.h5")
    unbroken.warm_start(half, source / "x.weights.h5", cast=["*"])
    assert weights_equal(half, expected(source))


def test_a_torch_module_takes_weights_of_keras_and_tensorflow_by_a_map(source: Path, tmp_path: Path) -> None:
    class Twin(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = torch.nn.Parameter(torch.zeros(4, 2))
            self.bias = torch.nn.Parameter(torch.zeros(2))

    prefix = tf.train.Checkpoint(net=Affine(3.0), step=tf.Variable(1)).save(str(tmp_path / "ckpt"))
    twin = Twin()
    unbroken.warm_start(twin, prefix)
    assert torch.equal(twin.kernel, torch.full((4, 2), 3.0))
    layer = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    layer.save_weights(tmp_path / "one.weights.h5")
    unbroken.warm_start(
        twin,
        tmp_path / "one.weights.h5",
        rename={"layers/dense/kernel": "kernel", "layers/dense/bias": "bias"},
    )
    assert np.array_equal(twin.kernel.detach().numpy(), layer.get_weights()[0])


def test_a_module_of_tensorflow_takes_the_part_of_a_checkpoint_that_is_named(tmp_path: Path) -> None:
    prefix = tf.train.Checkpoint(one=Affine(1.0), two=Affine(2.0)).save(str(tmp_path / "ckpt"))
    module = Affine(0.0)
    unbroken.warm_start(module, prefix, part="two")
    assert module.kernel.numpy().tolist() == [[2.0, 2.0]] * 4
    with pytest.raises(UsageError, match="to be one of one, two"):
        unbroken.warm_start(module, prefix, part="three")


def test_several_objects_that_fit_alike_are_refused_until_one_is_named(tmp_path: Path) -> None:
    prefix = tf.train.Checkpoint(one=Affine(1.0), two=Affine(2.0)).save(str(tmp_path / "ckpt"))
    with pytest.raises(UsageError, match="one of one, two, which fit the model alike"):
        unbroken.warm_start(Affine(0.0), prefix)
    assert unbroken.warm_start(Affine(0.0), prefix, part="one").source.endswith("ckpt-1 (one)")


def test_a_part_of_what_has_none_is_refused(source: Path) -> None:
    with pytest.raises(UsageError, match="which has one model"):
        unbroken.warm_start(build(), source / "x.weights.h5", part="model")


def test_a_type_that_no_model_takes_is_in_nobodys_way_and_named_where_it_is_wanted(tmp_path: Path) -> None:
    class Wide(Affine):
        def __init__(self) -> None:
            super().__init__(1.0)
            self.wide = tf.Variable(tf.constant([1 + 2j], tf.complex128))

    prefix = tf.train.Checkpoint(net=Wide()).save(str(tmp_path / "ckpt"))
    module = Affine(0.0)
    report = unbroken.warm_start(module, prefix, allow=["wide"])
    assert [str(item) for item in report.allowed] == ["wide: the model lacks it"]
    assert module.bias.numpy().tolist() == [1.0, 1.0]
    with pytest.raises(StorageError, match="complex128"):
        unbroken.warm_start(module, prefix, rename={"wide": "bias", "bias": "other"})


class Tied(keras.layers.Layer):
    def __init__(self, embedding: keras.layers.Embedding) -> None:
        super().__init__()
        self.table = embedding.embeddings

    def call(self, inputs: Any) -> Any:
        return inputs @ keras.ops.transpose(self.table)


def tied(seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    inputs, embedding = keras.Input((3,), dtype="int32"), keras.layers.Embedding(5, 2)
    embedding.build()
    return keras.Model(inputs, Tied(embedding)(embedding(inputs)))


def test_weights_that_layers_share_are_written_for_each_and_taken_once(tmp_path: Path) -> None:
    old = tied(1)
    with unbroken.Run(tmp_path / "run", model=old) as run:
        run.step(loss=1.0)
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "out.weights.h5")]) == 0
    old.save_weights(tmp_path / "own.weights.h5")
    loaded = tied(2)
    loaded.load_weights(tmp_path / "out.weights.h5")
    assert weights_equal(loaded, old.get_weights())
    for name in ("own", "out"):
        started = tied(3)
        unbroken.warm_start(started, tmp_path / f"{name}.weights.h5", allow=["unbroken.*", "unbroken/*"])
        assert weights_equal(started, old.get_weights())


def test_a_configuration_that_is_damaged_is_said_to_be(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.save(tmp_path / "x.h5")
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        file.attrs["model_config"] = "{bad"
    with pytest.raises(DamagedError, match="a configuration in JSON"):
        unbroken.warm_start(model, tmp_path / "x.h5")


def saved_by_names(path: Path) -> str:
    """Write what a script of TensorFlow 1 leaves behind: a kernel, its moments, and the count of steps."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        kernel = tf.compat.v1.get_variable("dense/kernel", initializer=tf.fill((4, 2), 5.0))
        bias = tf.compat.v1.get_variable("dense/bias", initializer=tf.fill((2,), 6.0))
        steps = tf.compat.v1.train.get_or_create_global_step()
        loss = tf.reduce_sum(kernel) + tf.reduce_sum(bias)
        tf.compat.v1.train.AdamOptimizer().minimize(loss, global_step=steps)
        session.run(tf.compat.v1.global_variables_initializer())
        return str(tf.compat.v1.train.Saver().save(session, str(path), global_step=12))


def test_names_of_tensorflow_1_become_those_of_a_model_by_a_map(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = saved_by_names(tmp_path / "model.ckpt")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="last")])
    with pytest.raises(StateMismatchError, match=r"last\.kernel: the source lacks it"):
        unbroken.warm_start(model, prefix)
    for names in ({"dense": "last"}, {"dense/kernel:0": "last.kernel", "dense/bias": "last.bias"}):
        again = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="last")])
        unbroken.warm_start(again, prefix, rename=names)
        assert again.get_weights()[0].tolist() == [[5.0, 5.0]] * 4
        assert again.get_weights()[1].tolist() == [6.0, 6.0]
    assert main(["inspect", prefix]) == 0
    assert "dense" in capsys.readouterr().out


def test_an_average_that_is_mapped_takes_the_place_of_what_it_is_of(tmp_path: Path) -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        for name, value in (("w", 1.0), ("w/ExponentialMovingAverage", 7.0), ("w/offset", 3.0)):
            tf.compat.v1.get_variable(name, initializer=value)
        session.run(tf.compat.v1.global_variables_initializer())
        prefix = tf.compat.v1.train.Saver().save(session, str(tmp_path / "model.ckpt"))

    class Scalar(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = tf.Variable(0.0)

    scalar = Scalar()
    unbroken.warm_start(scalar, prefix, rename={re.compile(r"/ExponentialMovingAverage$"): ""})
    assert float(scalar.w) == 7.0
    with pytest.raises(UsageError, match="found 'nonsense', which is none"):
        unbroken.warm_start(scalar, prefix, rename={"nonsense": "w"})


def test_what_savers_by_name_keep_for_optimizers_is_no_weight() -> None:
    names = {"a/kernel", "a/kernel/Adam", "a/kernel/Adam_1", "beta1_power", "global_step", "b/c"}
    assert {name for name in names if not is_kept_for_training(name, names)} == {"a/kernel", "b/c"}


def test_damage_is_found_before_anything_is_changed(source: Path, tmp_path: Path) -> None:
    data = bytearray((source / "x.keras").read_bytes())
    data[data.index(expected(source)[0].tobytes()) + 3] ^= 1
    (tmp_path / "x.keras").write_bytes(data)
    (prefix,) = (source / "bundle").glob("ckpt-1.data-*")
    bundle = bytearray(prefix.read_bytes())
    bundle[bundle.index(expected(source)[0].tobytes()) + 3] ^= 1
    (tmp_path / prefix.name).write_bytes(bundle)
    (tmp_path / "ckpt-1.index").write_bytes((source / "bundle/ckpt-1.index").read_bytes())
    model = build()
    before = model.get_weights()
    for name in ("x.keras", "ckpt-1"):
        with pytest.raises(DamagedError):
            unbroken.warm_start(model, tmp_path / name)
    assert weights_equal(model, before)


@pytest.mark.chaos
def test_a_run_of_keras_becomes_a_file_that_load_weights_takes_and_that_starts_others(
    source: Path, tmp_path: Path
) -> None:
    model = build()
    unbroken.warm_start(model, source / "x.keras")
    with unbroken.Run(tmp_path / "run", model=model) as run:
        run.step(loss=1.0)
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "out.weights.h5")]) == 0
    loaded, started = build(), build()
    loaded.load_weights(tmp_path / "out.weights.h5")
    unbroken.warm_start(started, tmp_path / "out.weights.h5")
    assert weights_equal(loaded, expected(source))
    assert weights_equal(started, expected(source))
