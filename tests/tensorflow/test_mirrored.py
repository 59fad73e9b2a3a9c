"""A mirrored strategy on two devices: each copy of each variable goes on as if nothing had happened."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unbroken import Run
from unbroken.checkpoint.store import CheckpointStore
from unbroken.errors import StateMismatchError, UnsupportedStateError
from unbroken.testing.runs import compare_runs

from .. import quiet_tensorflow  # noqa: F401
from ..zygote import run_script
from .mirrored_script import Training, train, variable

import keras  # isort: skip
import tensorflow as tf  # isort: skip

SCRIPT = Path(__file__).with_name("mirrored_script.py")


def strategy_of(devices: int = 2) -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(devices)])


def copies(values: tf.Variable) -> list[Any]:
    return [copy.numpy().tolist() for copy in values.values]


def all_copies(training: Training) -> dict[str, list[bytes]]:
    parts = training.parts
    keras_variables = [
        *parts["model"].variables,
        *parts["optimizer"].variables,
        *parts["error"].variables,
    ]
    counts = {name: getattr(parts["counts"], name) for name in ("samples", "total", "mean", "first")}
    # Without the numbers that Keras gives what it has named by itself.
    names = [re.sub(r"_\d+", "", one.path.rpartition("/")[2]) for one in keras_variables]
    named = {f"{index} {name}": keras_variables[index].value for index, name in enumerate(names)} | counts
    return {name: [copy.numpy().tobytes() for copy in one.values] for name, one in named.items()}


@pytest.mark.chaos
def test_training_in_step_goes_on_bit_for_bit_in_every_copy(tmp_path: Path) -> None:
    whole = Training.built()
    train(whole, tmp_path / "whole", 11)
    with pytest.raises(SystemExit, match="75"):
        train(Training.built(), tmp_path / "parts", 11, 8, signal.SIGTERM)
    resumed = other()
    train(resumed, tmp_path / "parts", 11)

    expected = all_copies(whole)
    assert all_copies(resumed) == expected
    differing = {name.partition(" ")[2] or name for name, (one, other) in expected.items() if one != other}
    assert differing >= {"moving_mean", "moving_variance", "total", "mean"}, "what has to be kept for each"


def other() -> Training:
    """Return the same training with other weights: those of a checkpoint must win."""
    training = Training.built()
    for weight in training.parts["model"].weights:
        weight.assign(weight + 1)
    return training


@pytest.mark.chaos
def test_a_killed_training_in_step_goes_on_bit_for_bit(tmp_path: Path) -> None:
    for end_at in (4, 5, 11):
        ended = trained(tmp_path / "killed", 14, end_at, signal.SIGKILL)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
    for directory in ("killed", "whole"):
        assert trained(tmp_path / directory, 14).returncode == 0
    assert compare_runs(tmp_path / "whole", tmp_path / "killed").differences == ()


def trained(directory: Path, *arguments: int) -> Any:
    output = directory.parent / "output"
    return run_script(
        SCRIPT, str(directory), *map(str, map(int, arguments)), output=output, framework="tensorflow"
    )


@pytest.mark.parametrize("aggregation", ["SUM", "MEAN"])
def test_a_value_made_of_all_copies_is_the_same_on_another_number_of_replicas(
    tmp_path: Path, aggregation: str
) -> None:
    with strategy_of(2).scope():
        two = variable(0.0, aggregation)
    for copy, value in zip(two.values, (3, 4), strict=True):
        copy.assign(value)
    save(tmp_path, total=two)
    with strategy_of(1).scope():
        one = variable(0.0, aggregation)
    with pytest.raises(
        StateMismatchError, match=r"1 replicas, the checkpoint has a value of its own for each"
    ):
        restore(tmp_path, total=one)
    assert one.numpy() == 0
    restore(tmp_path, total=one, allow=["total.(replicas)"])
    assert one.numpy() == {"SUM": 7.0, "MEAN": 3.5}[aggregation]


def test_what_is_the_same_on_all_replicas_goes_on_on_any_number(tmp_path: Path) -> None:
    with strategy_of(1).scope():
        one = tf.Variable([1.0, 2.0])
    plain = tf.Variable([3.0, 4.0])
    save(tmp_path / "one", weights=one)
    save(tmp_path / "plain", weights=plain)
    with strategy_of(2).scope():
        two = tf.Variable([0.0, 0.0])
    restore(tmp_path / "one", weights=two)
    assert copies(two) == [[1.0, 2.0]] * 2
    restore(tmp_path / "plain", weights=two)
    assert copies(two) == [[3.0, 4.0]] * 2
    save(tmp_path / "two", weights=two)
    restore(tmp_path / "two", weights=one)
    assert copies(one) == [[3.0, 4.0]]


def test_weights_that_have_drifted_apart_are_said_so_once_and_kept_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with strategy_of().scope():
        weights = tf.train.Checkpoint(kernel=tf.Variable(tf.zeros(3)), bias=tf.Variable(0.0))
    with Run(tmp_path, weights=weights) as run:
        run.step()
        run.save()
        assert "drifted apart" not in capsys.readouterr().err
        weights.kernel.values[1].assign([0.0, 0.0, 1e-7])
        for _ in range(2):
            run.step()
            run.save()
    said = capsys.readouterr().err
    assert said.count("the replicas have drifted apart: the copies of kernel are not the same") == 1
    weights.kernel.assign(tf.ones(3))
    restore(tmp_path, weights=weights)
    assert copies(weights.kernel) == [[0.0] * 3, [0.0, 0.0, float(np.float32(1e-7))]]


@pytest.mark.parametrize("values", [(1.0, 2.0), (True, False), (0.0, -0.0)], ids=str)
def test_copies_that_differ_are_not_made_one_inside_a_dictionary(tmp_path: Path, values: Any) -> None:
    with strategy_of().scope():
        one = tf.Variable(values[0], trainable=False)
    save(tmp_path / "alike", all={"one": one})
    one.values[1].assign(values[1])
    with pytest.raises(UnsupportedStateError, match=r"all/one: .* whose copies are not one value") as caught:
        save(tmp_path / "unlike", all={"one": one})
    assert "as a part of its own" in str(caught.value.hint)


def test_copies_of_another_shape_are_left_like_all_that_was_allowed(tmp_path: Path) -> None:
    def build(size: int) -> tf.Module:
        module = tf.Module()
        with strategy_of().scope():
            module.kernel = tf.Variable(tf.zeros(size), trainable=False)
        module.scale = tf.Variable(0.0)
        return module

    old, new = build(3), build(2)
    old.kernel.values[1].assign([1.0, 2.0, 3.0])
    old.scale.assign(5.0)
    save(tmp_path, net=old)
    restore(tmp_path, net=new, allow=["net.kernel"])
    assert (copies(new.kernel), new.scale.numpy()) == ([[0.0, 0.0]] * 2, 5.0)


def test_the_statistics_of_each_replica_follow_a_layer_to_its_new_name(tmp_path: Path) -> None:
    with strategy_of().scope():
        old, new = (
            keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization(name=name)])
            for name in ("norm", "scale")
        )
    old.layers[0].moving_mean.value.values[1].assign([3.0, 4.0])
    save(tmp_path, model=old)
    restore(tmp_path, model=new, rename={"model.norm": "model.scale"})
    assert copies(new.layers[0].moving_mean.value) == [[0.0, 0.0], [3.0, 4.0]]


def test_a_checkpoint_has_the_value_that_reading_gives_for_others_to_use(tmp_path: Path) -> None:
    with strategy_of().scope():
        total = variable(0.0, "SUM")
    for copy, value in zip(total.values, (0.25, 0.5), strict=True):
        copy.assign(value)
    save(tmp_path, total=total)
    loaded = CheckpointStore(tmp_path).latest().load()["total"]
    assert np.frombuffer(loaded["value"].data, np.float32).tolist() == [0.75]


def save(directory: Path, **parts: Any) -> None:
    with Run(directory, **parts) as run:
        run.step()


def restore(directory: Path, **parts: Any) -> None:
    with Run(directory, resume="must", **parts):
        pass
