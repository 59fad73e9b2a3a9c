"""What TensorFlow's own checkpoints pass over inside of modules: kept, refused or named, never lost."""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path
from typing import Any

import pytest

import unbroken
from unbroken.errors import UnsupportedStateError

from .. import quiet_tensorflow  # noqa: F401
from .keeping import manifest, restore, save

import keras  # isort: skip
import tensorflow as tf  # isort: skip


@dataclasses.dataclass(slots=True)
class Slotted:
    average: Any
    count: int = 0


class Counting(keras.layers.Layer):
    """Has what Keras does not know of: a raw variable, a list of them, and a number that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.raw, self._hidden = tf.Variable(0.0), tf.Variable(0.0)
        self.several, self.count, self.recent = [tf.Variable(0.0)], 0, [0]
        self.dense = keras.layers.Dense(1)

    def build(self, shape: Any) -> None:
        self.dense.build(shape)
        self.built = True

    def train(self) -> None:
        for variable in (self.raw, self._hidden, *self.several):
            variable.assign_add(1.0)
        self.count += 1
        self.recent = [*self.recent, self.count]

    def found(self) -> list[Any]:
        variables = (self.raw, self._hidden, *self.several)
        return [*(float(variable.numpy()) for variable in variables), self.count, [*self.recent]]


def compiled() -> Any:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def test_what_the_user_keeps_on_a_layer_inside_a_module_goes_on(tmp_path: Path) -> None:
    def build() -> tuple[tf.Module, Counting]:
        module, layer = tf.Module(), Counting()
        layer.build((1, 2))
        module.net = keras.Sequential([keras.Input((2,)), layer])
        return module, layer

    module, layer = build()
    with unbroken.Run(tmp_path, module=module) as run:
        layer.train()
        run.step()
    live, other = build()
    restore(tmp_path, module=live)
    assert other.found() == layer.found() == [1.0, 1.0, 1.0, 1, [0, 1]]
    names = [name for name in manifest(tmp_path).parts["module"].state if name.endswith("kernel")]
    assert names == ["net.0.kernel"]


def test_a_compiled_model_inside_a_checkpoint_is_refused_unless_its_optimizer_is_kept(tmp_path: Path) -> None:
    model = compiled()
    inside = tf.train.Checkpoint(model=model)
    with pytest.raises(UnsupportedStateError, match=r"all\.model: a compiled model of Keras") as caught:
        save(tmp_path / "alone", all=inside)
    assert "pass the model as a part of its own" in str(caught.value.hint)
    save(tmp_path / "both", all=inside, model=model)
    save(tmp_path / "optimizer", all=tf.train.Checkpoint(model=model, optimizer=model.optimizer))
    assert any("adam" in name or "iteration" in name for name in manifest(tmp_path / "optimizer").tensors)


def test_averages_slots_and_deques_are_gone_into(tmp_path: Path) -> None:
    def build(value: float) -> tf.Module:
        module = tf.Module()
        module.weight = tf.Variable(value)
        module.average = tf.train.ExponentialMovingAverage(0.5)
        module.average.apply([module.weight])
        module.slotted = Slotted(tf.Variable(value))
        module.queue = collections.deque([tf.Variable(value)])
        module.recent = collections.deque([0], maxlen=2)
        return module

    saved = build(1.0)
    with unbroken.Run(tmp_path, module=saved) as run:
        saved.weight.assign(3.0)
        saved.average.apply([saved.weight])
        saved.slotted.count += 1
        saved.recent.extend([1, 2])
        run.step()
    live = build(0.0)
    restore(tmp_path, module=live)
    assert float(live.average.average(live.weight)) == 2.0
    assert (live.slotted.average.numpy(), live.slotted.count, live.queue[0].numpy()) == (1.0, 1, 1.0)
    assert live.recent == collections.deque([1, 2])
    assert live.recent.maxlen == 2


def test_a_queue_in_a_container_is_pointed_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = tf.Module()
    module.weight, module.waiting = tf.Variable(1.0), {"batches": tf.queue.FIFOQueue(3, [tf.float32])}
    save(tmp_path, module=module)
    assert "module.waiting.batches: a FIFOQueue, whose state nobody can read" in capsys.readouterr().err


def test_keys_keep_their_kind_and_what_was_deleted_is_gone(tmp_path: Path) -> None:
    def build() -> tf.Module:
        module = tf.Module()
        module.by_size = {1: tf.Variable(1.0), 2: 0, "old": 5}
        module.items = [tf.Variable(1.0), 1, 2]
        module.note = "of the script"
        return module

    saved = build()
    with unbroken.Run(tmp_path, module=saved) as run:
        saved.by_size[3] = 7
        del saved.by_size["old"], saved.items[2], saved.note
        run.step()
    for _ in range(2):
        live = build()
        with unbroken.Run(tmp_path, module=live) as run:
            run.step()
        assert [*live.by_size] == [1, 2, 3]
        assert (live.by_size[3], live.items[1:], hasattr(live, "note")) == (7, [1], False)
