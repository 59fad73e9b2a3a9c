"""Modules, checkpoints, containers and tables of TensorFlow as parts: all of them, in place, or nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unbroken
from unbroken.errors import StateMismatchError, UnsupportedStateError
from unbroken.training import families

from .. import quiet_tensorflow  # noqa: F401
from .keeping import manifest, restore, save

import tensorflow as tf  # isort: skip


class Layer(tf.Module):
    def __init__(self, size: int, value: float = 1.0) -> None:
        super().__init__()
        self.kernel = tf.Variable(tf.fill((size, size), value))
        self.bias = tf.Variable(tf.zeros(size), trainable=False)


@dataclasses.dataclass
class Noted:
    """Of the user, and of no framework."""

    average: Any
    note: str = "as the script says"


class Net(tf.Module):
    """Has variables wherever they can be, and other values beside them."""

    def __init__(self, value: float = 1.0, size: int = 2) -> None:
        super().__init__(name="net")
        self.layers = [Layer(size, value), Layer(3, value)]
        self.by_name = {"head": Layer(size, value), "scale": tf.Variable(value)}
        self.pair = (tf.Variable(value), "fixed")
        self.noted = Noted(tf.Variable(value))
        self.tied = self.layers[0].kernel
        self.calls, self.rate, self.best = 0, 0.5, None
        self.recent: list[float] = []
        self.sums = np.zeros(3)
        self.mean = tf.constant(0.0)

    @tf.function
    def train(self) -> None:
        for variable in self.trainable_variables:
            variable.assign_add(tf.ones_like(variable) * 0.1)

    def step(self) -> None:
        self.train()
        self.noted.average.assign_add(1.0)
        self.calls += 1
        self.recent = [*self.recent, float(self.layers[0].kernel[0, 0])][-2:]
        self.sums[1] += 2.5
        self.mean = self.mean * 0.5 + 1.0
        self.best = max(self.best or 0, self.calls)


def contents(net: Net) -> list[Any]:
    arrays = [variable.numpy().tolist() for variable in (*net.variables, net.noted.average)]
    plain = [net.calls, net.rate, net.best, list(net.recent), net.sums.tolist(), float(net.mean)]
    return [arrays, plain]


def trained(directory: Path, steps: int, **arguments: Any) -> Net:
    net = Net(**arguments)
    with unbroken.Run(directory, net=net) as run:
        while run.step_count < steps:
            net.step()
            run.step()
    return net


def test_a_module_goes_on_with_all_that_it_has_also_what_tensorflow_drops(tmp_path: Path) -> None:
    expected = trained(tmp_path / "whole", 5)
    trained(tmp_path / "stopped", 2)
    trained(tmp_path / "stopped", 4)
    found = trained(tmp_path / "stopped", 5)
    assert contents(found) == contents(expected)
    states = [manifest(tmp_path / each).parts["net"] for each in ("whole", "stopped")]
    assert states[0] == states[1]
    state = states[0].state
    assert {
        "layers.0.kernel",
        "by_name.head.bias",
        "by_name.scale",
        "pair.0",
        "noted.average",
    } <= state.keys()
    assert state["tied"] == state["layers.0.kernel"]
    assert state["(attributes)"][""].keys() == {"best", "calls", "mean", "recent", "sums"}
    assert manifest(tmp_path / "whole").tensors["net/tied"].aliases == ("net/layers.0.kernel",)


def test_a_setting_of_the_script_stays_as_the_script_says(tmp_path: Path) -> None:
    trained(tmp_path, 2)
    net = Net()
    net.rate = 0.25
    restore(tmp_path, net=net)
    assert (net.rate, net.calls) == (0.25, 2)


def test_names_of_variables_and_scopes_are_no_matter_places_are(tmp_path: Path) -> None:
    first, second = tf.Module(), tf.Module()
    first.kernel = tf.Variable(3.0, name="dense/kernel")
    save(tmp_path, model=first)
    second.kernel = tf.Variable(0.0, name="dense_7/other")
    restore(tmp_path, model=second)
    assert second.kernel.numpy() == 3.0
    third = tf.Module()
    third.net = tf.Variable(0.0, name="dense/kernel")
    with pytest.raises(StateMismatchError) as caught:
        restore(tmp_path, model=third)
    assert "model: net: the checkpoint lacks it" in str(caught.value)
    assert "model: kernel: the program lacks it" in str(caught.value)
    restore(tmp_path, model=third, rename={"model.kernel": "model.net"})
    assert third.net.numpy() == 3.0


def test_nothing_is_changed_when_one_of_three_does_not_fit(tmp_path: Path) -> None:
    trained(tmp_path, 1)
    net = Net(value=7.0, size=4)
    before = contents(net)
    with pytest.raises(StateMismatchError) as caught:
        restore(tmp_path, net=net)
    assert contents(net) == before
    for place in ("layers.0.kernel", "layers.0.bias", "by_name.head.kernel"):
        assert f"net: {place}: shape" in str(caught.value)
    assert "shape (4, 4), the checkpoint has shape (2, 2)" in str(caught.value)


def test_another_dtype_is_refused_and_can_be_cast_by_name(tmp_path: Path) -> None:
    save(tmp_path, model=tf.Variable([1.5, 2.5]))
    half = tf.Variable([0.0, 0.0], dtype=tf.bfloat16)
    with pytest.raises(StateMismatchError, match="dtype bfloat16, the checkpoint has dtype float32"):
        restore(tmp_path, model=half)
    restore(tmp_path, model=half, cast=["model"])
    assert half.numpy().tolist() == [1.5, 2.5]


def test_a_checkpoint_object_is_kept_by_the_paths_that_tensorflow_gives(tmp_path: Path) -> None:
    def build(value: float) -> tf.train.Checkpoint:
        return tf.train.Checkpoint(net=Layer(2, value), step=tf.Variable(int(value)))

    save(tmp_path, all=build(5.0))
    live = build(0.0)
    restore(tmp_path, all=live)
    assert (live.step.numpy(), live.net.kernel.numpy()[0, 0]) == (5, 5.0)
    assert manifest(tmp_path).parts["all"].state.keys() == {"net.kernel", "net.bias", "step", "save_counter"}


def test_variables_in_containers_and_objects_are_filled_in_place(tmp_path: Path) -> None:
    def build(value: float) -> dict[str, Any]:
        shared = tf.Variable(value)
        return {
            "table": {"slots": [tf.Variable([value]), (shared, shared)], "loss": tf.constant(value)},
            "noted": Noted(tf.Variable(value), note=str(value)),
        }

    save(tmp_path, **build(2.0))
    live = build(0.0)
    slot, (shared, _), average = *live["table"]["slots"], live["noted"].average
    restore(tmp_path, **live)
    assert live["table"]["slots"][0] is slot
    assert live["table"]["slots"][1][0] is live["table"]["slots"][1][1] is shared
    assert live["noted"].average is average
    assert [slot.numpy()[0], shared.numpy(), average.numpy(), live["noted"].note] == [2.0, 2.0, 2.0, "2.0"]
    assert tf.is_tensor(live["table"]["loss"])
    assert float(live["table"]["loss"]) == 2.0


MISFITS: dict[str, tuple[Any, str]] = {
    "shape": ({"w": tf.Variable([1.0, 2.0]), "b": tf.Variable(1.0)}, "all: w: shape"),
    "kind": ({"w": np.zeros(3), "b": tf.Variable(1.0)}, "all: w: expected the variable"),
    "missing": (
        {"w": tf.Variable([1.0] * 3), "b": tf.Variable(1.0), "c": tf.Variable(1.0)},
        "all: c: the checkpoint lacks",
    ),
    "two": (
        dict.fromkeys(("w", "b"), tf.Variable(1.0, shape=tf.TensorShape(None))),
        "all: b: it stands in two",
    ),
    "unexpected": ({"b": tf.Variable(1.0)}, "all: w: expected the variable"),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_a_variable_in_a_container_is_never_replaced_by_an_array(tmp_path: Path, kind: str) -> None:
    save(tmp_path, all={"w": tf.Variable([9.0] * 3), "b": tf.Variable(9.0)})
    live, message = MISFITS[kind]
    with pytest.raises(StateMismatchError) as caught:
        restore(tmp_path, all=live)
    assert message in str(caught.value)
    assert live["b"].numpy() == 1.0


def test_entries_of_lookup_tables_are_kept_and_those_put_in_since_are_gone(tmp_path: Path) -> None:
    def build() -> tf.Module:
        module = tf.Module()
        module.counts = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
        module.vectors = tf.lookup.experimental.DenseHashTable(
            tf.int64, tf.float32, [0.0, 0.0], empty_key=-1, deleted_key=-2
        )
        return module

    saved = build()
    saved.counts.insert(tf.constant(["b", "a"]), tf.constant([2, 1], tf.int64))
    saved.vectors.insert(tf.constant([5], tf.int64), tf.constant([[0.5, 1.5]]))
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.string, "")
    table.insert(tf.constant([3], tf.int64), tf.constant(["three"]))
    save(tmp_path, module=saved, table=table)
    live = build()
    live.counts.insert(tf.constant(["other"]), tf.constant([9], tf.int64))
    empty = tf.lookup.experimental.MutableHashTable(tf.int64, tf.string, "")
    restore(tmp_path, module=live, table=empty)
    assert live.counts.lookup(tf.constant(["a", "b", "other"])).numpy().tolist() == [1, 2, -1]
    assert live.vectors.lookup(tf.constant([5], tf.int64)).numpy().tolist() == [[0.5, 1.5]]
    assert empty.lookup(tf.constant([3], tf.int64)).numpy().tolist() == [b"three"]


def test_what_is_not_built_is_refused_with_the_call_to_make(tmp_path: Path) -> None:
    import keras

    class Lazy(tf.Module):
        pass

    with pytest.raises(UnsupportedStateError, match="net: it has no variables yet") as caught:
        save(tmp_path / "empty", net=Lazy())
    assert "call net(batch) once before the run starts" in str(caught.value.hint)
    module = tf.Module()
    module.dense, module.w = keras.layers.Dense(3), tf.Variable(1.0)
    with pytest.raises(UnsupportedStateError, match=r"net.dense: not built yet") as caught:
        save(tmp_path / "unbuilt", net=module)
    assert "net.dense.build(input_shape)" in str(caught.value.hint)
    module.dense.build((1, 2))
    save(tmp_path / "built", net=module)
    assert {"dense.0.kernel", "dense.1.bias", "w"} == manifest(tmp_path / "built").parts["net"].state.keys()


def test_what_is_made_too_late_or_cannot_be_read_is_pointed_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = Net()
    net.samples = iter(tf.data.Dataset.range(3))
    net.log = list(range(200))
    with unbroken.Run(tmp_path, net=net) as run:
        net.late = tf.Variable(1.0)
        net.log.append(1)
        run.step()
    said = capsys.readouterr().err
    assert "net.late: made after the run was entered; call net(batch) before" in said
    assert "net.samples: a OwnedIterator, whose state nobody can read" in said
    assert "net.log: a list of 201 items that changes" in said


def test_what_is_not_finite_in_a_trained_variable_marks_the_checkpoint(tmp_path: Path) -> None:
    net = Net()
    net.layers[0].bias.assign([np.inf, 0.0])
    with unbroken.Run(tmp_path, net=net) as run:
        net.layers[1].kernel[0, 0].assign(np.nan)
        run.step()
    assert families.bad_tensors({"net": net}) == ["net.layers.1.kernel"]
    assert manifest(tmp_path).non_finite.keys() == {"net/layers.1.kernel"}
