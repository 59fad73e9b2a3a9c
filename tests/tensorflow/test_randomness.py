"""The randomness of TensorFlow and Keras goes on, in a fresh process too; what cannot is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unbroken
from unbroken.errors import StateMismatchError

from .. import quiet_tensorflow  # noqa: F401
from .keeping import restore, save

import tensorflow as tf  # isort: skip


def test_generators_are_kept_as_parts_and_inside_of_them_and_set_in_place(tmp_path: Path) -> None:
    def build(seed: int) -> tuple[Any, Any]:
        module = tf.Module()
        module.w, module.noise = tf.Variable(1.0), [{"by": tf.random.Generator.from_seed(seed)}]
        return tf.random.Generator.from_seed(seed), module

    one, module = build(1)
    one.uniform([3])
    module.noise[0]["by"].normal([3])
    save(tmp_path, one=one, module=module)
    expected = one.uniform([2]).numpy(), module.noise[0]["by"].normal([2]).numpy()
    other, live = build(7)
    held = live.noise[0]["by"]
    restored = restore(tmp_path, one=other, module=live)
    assert live.noise[0]["by"] is held
    found = other.uniform([2]).numpy(), held.normal([2]).numpy()
    assert [np.array_equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True)] == [
        True,
        True,
    ]
    assert restored.restored is not None
    with pytest.raises(StateMismatchError, match=r"Generator of algorithm 2, the checkpoint has"):
        restore(tmp_path, one=tf.random.Generator.from_seed(1, alg="threefry"), module=live)


@pytest.fixture
def generators(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that has the global generator, which nobody has made yet, and a seed of the program."""
    from tensorflow.python.ops import stateful_random_ops

    monkeypatch.setattr(stateful_random_ops, "global_generator", None)
    tf.random.set_seed(3)
    return stateful_random_ops


def test_nobody_makes_the_global_generator_to_look_at_it(tmp_path: Path, generators: Any) -> None:
    save(tmp_path / "none", weight=tf.Variable(1.0))
    assert generators.global_generator is None
    tf.random.get_global_generator().reset_from_seed(5)
    save(tmp_path / "one", weight=tf.Variable(1.0))
    expected = tf.random.get_global_generator().uniform([2]).numpy()
    generators.global_generator = None
    restore(tmp_path / "one", weight=tf.Variable(1.0))
    assert np.array_equal(tf.random.get_global_generator().uniform([2]).numpy(), expected)


@pytest.mark.usefixtures("generators")
def test_a_global_generator_that_was_made_since_begins_as_it_is_and_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, weight=tf.Variable(1.0))
    tf.random.get_global_generator().reset_from_seed(5)
    restore(tmp_path, weight=tf.Variable(1.0))
    told = "the generator of tensorflow/global_generator came into use since and begins as it is"
    assert told in capsys.readouterr().err
    there = tf.random.get_global_generator().uniform([2]).numpy()
    assert np.array_equal(there, tf.random.Generator.from_seed(5).uniform([2]).numpy())


def test_random_operations_in_functions_are_named_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weight, generator = tf.Variable(1.0), tf.random.Generator.from_seed(1)

    @tf.function
    def noisy_step() -> None:
        weight.assign_add(tf.random.uniform([]) + tf.reduce_sum(tf.nn.dropout(tf.ones(3), 0.5)))

    @tf.function
    def looped_step(count: tf.Tensor) -> None:
        for _ in tf.range(count):
            weight.assign_add(tf.random.uniform([]))

    @tf.function
    def branched_step(count: tf.Tensor) -> None:
        weight.assign_add(tf.cond(count > 1, lambda: tf.random.normal([]), lambda: 0.0))

    @tf.function
    def sound_step() -> None:
        weight.assign_add(generator.uniform([]) + tf.random.stateless_uniform([], (1, 2)))

    with unbroken.Run(tmp_path, weight=weight, generator=generator) as run:
        for _ in range(3):
            noisy_step()
            looped_step(tf.constant(2))
            branched_step(tf.constant(2))
            sound_step()
            run.step()
    found = [line for line in capsys.readouterr().err.splitlines() if "random operations" in line]
    lines = [line for line in found if "ed_step" not in line]
    assert [line for line in found if "function looped_step: while/random_uniform/RandomUniform" in line]
    assert [line for line in found if "function branched_step: cond/random_normal/RandomStandard" in line]
    assert len([line for line in lines if "noisy_step" in line]) == 1
    assert "dropout/random_uniform/RandomUniform, random_uniform/RandomUniform" in lines[0]
    assert "draw from a tf.random.Generator that is a part" in lines[0]
    assert not [line for line in lines if "sound_step" in line]
