"""A checkpoint of tf.train.Checkpoint becomes the beginning of a run: weights, moments and counters."""

from __future__ import annotations

from .. import quiet_tensorflow  # noqa: F401  isort: skip

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import unbroken
from unbroken.errors import DamagedError, StateMismatchError, UsageError
from unbroken.state.choices import Choices
from unbroken.training import families
from unbroken.training.importing import begin_from

INPUTS = np.linspace(-1, 1, 24, dtype="float32").reshape(6, 4)
TARGETS = np.linspace(0, 1, 12, dtype="float32").reshape(6, 2)


def build(units: int = 3, kind: Any = keras.optimizers.Adam, **settings: Any) -> dict[str, Any]:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(units),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(2),
        ]
    )
    optimizer = kind(0.1, **settings)
    optimizer.build(model.trainable_variables)
    return {"model": model, "optimizer": optimizer, "step": tf.Variable(0, dtype=tf.int64)}


def train(model: keras.Model, optimizer: keras.Optimizer, step: tf.Variable, count: int) -> None:
    for _ in range(count):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(INPUTS, training=True) - TARGETS) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        step.assign_add(1)


def values(parts: dict[str, Any]) -> list[np.ndarray]:
    return [
        *(variable.numpy() for variable in parts["model"].variables),
        *(variable.numpy() for variable in parts["optimizer"].variables),
        parts["step"].numpy(),
    ]


def equal(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return len(one) == len(other) and all(map(np.array_equal, one, other))


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[np.ndarray]]:
    """Return the directory of an old training and the values two steps after its newest checkpoint."""
    directory = tmp_path_factory.mktemp("old")
    parts = build()
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(**parts), str(directory), max_to_keep=2)
    train(**parts, count=2)
    manager.save()
    train(**parts, count=1)
    manager.save()
    train(**parts, count=2)
    return directory, values(parts)


def test_training_goes_on_as_the_old_one_would_have(
    old: tuple[Path, list[np.ndarray]], tmp_path: Path
) -> None:
    directory, expected = old
    parts = build()
    with unbroken.Run(tmp_path / "run", start_from=directory, **parts) as run:
        assert run.restored is None
        assert run.started_from is not None
        assert run.started_from.source.endswith("ckpt-2")
        assert {name: amount.tensors for name, amount in run.started_from.parts.items()} == {
            "model": 8,
            "optimizer": 14,
            "step": 1,
        }
        assert parts["step"].numpy() == 3
        train(**parts, count=2)
        run.step()
        words = "\n".join(run.started_from.lines())
    assert equal(values(parts), expected)
    assert "random generators" in words
    assert "position in the data" in words
    # From here on the run's own checkpoints win.
    again = build()
    with unbroken.Run(tmp_path / "run", start_from=directory, **again) as run:
        assert run.started_from is None
        assert run.restored is not None
        assert equal(values(again), expected)


def test_every_difference_is_named_and_nothing_is_changed(
    old: tuple[Path, list[np.ndarray]], tmp_path: Path
) -> None:
    parts = build(5, kind=keras.optimizers.SGD)
    before = values(parts)
    with (
        pytest.raises(StateMismatchError) as refused,
        unbroken.Run(tmp_path, start_from=old[0] / "ckpt-2", **parts),
    ):
        pass
    lines = refused.value.message.splitlines()
    assert sum("shape" in line for line in lines) == 7
    assert sum("the program lacks it (adam" in line for line in lines) == 12
    assert equal(values(parts), before)


def test_moments_of_another_kind_of_optimizer_are_not_taken_for_its_own(tmp_path: Path) -> None:
    parts = build(kind=keras.optimizers.SGD, momentum=0.9)
    prefix = tf.train.Checkpoint(**parts).save(str(tmp_path / "ckpt"))
    with (
        pytest.raises(StateMismatchError, match=r"it is sgd.*momentum in the checkpoint, and lion"),
        unbroken.Run(tmp_path / "run", start_from=prefix, **build(kind=keras.optimizers.Lion)),
    ):
        pass


def small(kind: Any = keras.optimizers.Adam, rate: float = 0.1, value: float = 0.0) -> dict[str, Any]:
    """Return a model of one weight that is compiled with an optimizer, which has run `value` times."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, name="only")])
    model.compile(kind(rate), "mse")
    model.optimizer.build(model.trainable_variables)
    model.optimizer.iterations.assign(int(value))
    model.set_weights([np.full((1, 1), value, "float32")])
    return {"model": model, "optimizer": model.optimizer}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    prefix = tmp_path_factory.mktemp("compiled") / "ckpt"
    return str(tf.train.Checkpoint(**small(value=5.0)).save(str(prefix)))


def test_an_optimizer_begins_fresh_also_where_the_model_is_compiled_with_it(
    compiled: str, tmp_path: Path
) -> None:
    for kind in (keras.optimizers.Adam, keras.optimizers.SGD):
        parts, where = small(kind, rate=0.25), tmp_path / kind.__name__
        with unbroken.Run(where, start_from=compiled, fresh=["optimizer"], **parts) as run:
            assert run.started_from
            assert run.started_from.fresh == ("optimizer",)
            assert parts["model"].get_weights()[0].tolist() == [[5.0]]
            assert int(parts["optimizer"].iterations) == 0
            assert float(parts["optimizer"].learning_rate) == 0.25


def test_what_a_part_gets_is_counted_for_it_also_where_another_part_holds_it(
    compiled: str, tmp_path: Path
) -> None:
    parts = small()
    with unbroken.Run(tmp_path / "run", start_from=compiled, **parts) as run:
        assert run.started_from is not None
        assert run.started_from.fresh == ()
        counts = {name: amount.tensors for name, amount in run.started_from.parts.items()}
    assert counts == {"model": 1, "optimizer": 4}
    assert int(parts["optimizer"].iterations) == 5


def test_the_learning_rate_of_the_checkpoint_counts_unless_it_is_overridden_and_is_said(
    compiled: str, tmp_path: Path
) -> None:
    parts = small(rate=0.25)
    with unbroken.Run(tmp_path / "one", start_from=compiled, **parts) as run:
        assert float(parts["optimizer"].learning_rate) == pytest.approx(0.1)
        words = "\n".join(run.started_from.lines() if run.started_from else [])
    assert "optimizer.learning_rate: 0.1 as in the checkpoint, the script set 0.25" in words
    assert "beta_1" in words
    override, parts = ["optimizer.learning_rate"], small(rate=0.25)
    with unbroken.Run(tmp_path / "two", start_from=compiled, override=override, **parts) as run:
        assert float(parts["optimizer"].learning_rate) == 0.25
        words = "\n".join(run.started_from.lines() if run.started_from else [])
    assert "optimizer.learning_rate: as the script set it" in words


@pytest.mark.parametrize(
    "kind", [keras.optimizers.AdamW, pytest.param(keras.optimizers.RMSprop, marks=pytest.mark.chaos)]
)
def test_another_class_of_optimizer_is_refused_where_it_has_attributes_of_the_same_names(
    compiled: str, tmp_path: Path, kind: Any
) -> None:
    with (
        pytest.raises(StateMismatchError, match="optimizer: it is adam in the checkpoint, and"),
        unbroken.Run(tmp_path / "run", start_from=compiled, **small(kind)),
    ):
        pass


def test_a_rename_that_gives_two_parts_one_name_is_refused(tmp_path: Path) -> None:
    raw, both = tf.Variable(0.0), tf.train.Checkpoint(raw=tf.Variable(1.0), ema=tf.Variable(2.0))
    prefix = both.save(str(tmp_path / "ckpt"))
    with (
        pytest.raises(UsageError, match="several that become 'raw'"),
        unbroken.Run(tmp_path / "run", start_from=prefix, rename={"ema": "raw"}, raw=raw),
    ):
        pass
    apart = {"ema": "raw", "raw": "before"}
    with unbroken.Run(tmp_path / "run", start_from=prefix, rename=apart, allow=["before"], raw=raw):
        assert float(raw) == 2.0


def test_what_tensorflow_saves_for_no_object_is_missing_and_not_taken_for_whole(tmp_path: Path) -> None:
    class Plain:
        def __init__(self) -> None:
            self.hidden = tf.Variable(1.0)

    class Holder(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen, self.plain = tf.Variable(1.0), Plain()

    class Blocks(keras.Model):
        def __init__(self, names: str) -> None:
            super().__init__()
            self.blocks = {name: keras.layers.Dense(1, use_bias=False) for name in names}
            self.head = keras.layers.Dense(1, use_bias=False)
            for layer in (*self.blocks.values(), self.head):
                layer.build((None, 1))
            self.built = True

    def parts(names: str) -> dict[str, Any]:
        model, optimizer = Blocks(names), keras.optimizers.SGD(momentum=0.9)
        optimizer.build(model.trainable_variables)
        return {"model": model, "optimizer": optimizer}

    prefix = tf.train.Checkpoint(holder=Holder()).save(str(tmp_path / "plain"))
    with (
        pytest.raises(StateMismatchError, match=r"plain\.hidden: no object that TensorFlow saves leads to"),
        unbroken.Run(tmp_path / "run", start_from=prefix, holder=Holder()),
    ):
        pass
    prefix = tf.train.Checkpoint(**parts("ab")).save(str(tmp_path / "blocks"))
    with (
        pytest.raises(StateMismatchError) as refused,
        unbroken.Run(tmp_path / "run", start_from=prefix, **parts("ba")),
    ):
        pass
    assert refused.value.message.count("no object that TensorFlow saves leads to") == 2
    assert refused.value.message.count("stands here in the checkpoint cannot be told") == 2


def test_a_program_without_tensorflow_is_told_so(
    compiled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(families, "_FAMILIES", ())
    with pytest.raises(UsageError, match="expected TensorFlow, of whose objects"):
        begin_from(Path(compiled), {"step": {"value": 1}}, Choices())


def test_a_checkpoint_of_which_a_file_is_gone_is_damage(plain: str, tmp_path: Path) -> None:
    Path(f"{plain}.data-00000-of-00001").unlink()
    with (
        pytest.raises(DamagedError, match="a whole checkpoint"),
        unbroken.Run(tmp_path / "run", start_from=plain, line=Line(), step=tf.Variable(0)),
    ):
        pass


def test_a_dictionary_of_variables_is_a_part_like_others(tmp_path: Path) -> None:
    prefix = tf.train.Checkpoint(vars={"a": tf.Variable(1.0)}).save(str(tmp_path / "ckpt"))
    variables = {"a": tf.Variable(0.0)}
    with unbroken.Run(tmp_path / "run", start_from=prefix, vars=variables):
        assert float(variables["a"]) == 1.0


class Line(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [tf.Variable([0.0, 0.0]), {"deep": tf.Variable(0)}]


@pytest.fixture
def plain(tmp_path: Path) -> str:
    saved = Line()
    saved.layers[0].assign([1.0, 2.0])
    saved.layers[1]["deep"].assign(3)
    return tf.train.Checkpoint(line=saved, step=tf.Variable(7)).save(str(tmp_path / "ckpt"))


def test_what_has_another_name_is_refused_until_it_is_mapped(plain: str, tmp_path: Path) -> None:
    parts = {"curve": Line(), "step": tf.Variable(0)}
    with pytest.raises(StateMismatchError) as refused, unbroken.Run(tmp_path, start_from=plain, **parts):
        pass
    assert "curve: the checkpoint lacks this part" in refused.value.message
    assert "line: the program lacks this part" in refused.value.message
    with unbroken.Run(tmp_path / "run", start_from=plain, rename={"line": "curve"}, **parts) as run:
        assert run.started_from is not None
        assert run.started_from.parts["curve"].tensors == 2
        assert parts["step"].numpy() == 7


def test_parts_may_begin_anew_or_be_left_out_by_name_alone(plain: str, tmp_path: Path) -> None:
    parts = {"line": Line(), "more": {"count": 3}}
    with pytest.raises(StateMismatchError) as refused, unbroken.Run(tmp_path, start_from=plain, **parts):
        pass
    assert "more: the checkpoint lacks this part" in refused.value.message
    assert "step: the program lacks this part" in refused.value.message
    with unbroken.Run(tmp_path / "run", start_from=plain, fresh=["more"], allow=["step"], **parts) as run:
        assert run.started_from is not None
        assert run.started_from.fresh == ("more",)
        assert list(run.started_from.parts) == ["line"]
        assert parts["line"].layers[0].numpy().tolist() == [1.0, 2.0]
        assert parts["line"].layers[1]["deep"].numpy() == 3


def test_layers_that_have_changed_places_are_noticed(tmp_path: Path) -> None:
    class Two(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = tf.Variable(1.0), tf.Variable(2.0)

    class Moments(tf.Module):
        def __init__(self, variables: list[tf.Variable]) -> None:
            super().__init__()
            self._trainable_variables = variables
            self.momentums = [tf.Variable(0.0) for _ in variables]

    first, second = Two(), Two()
    saved = tf.train.Checkpoint(two=first, moments=Moments([first.one, first.other]))
    prefix = saved.write(str(tmp_path / "ckpt"))
    swapped = Moments([second.other, second.one])
    with (
        pytest.raises(StateMismatchError, match="another variable stands here"),
        unbroken.Run(tmp_path / "run", start_from=prefix, two=second, moments=swapped),
    ):
        pass


def as_keras_2(parts: dict[str, Any], prefix: Path, rate: float = 0.9) -> str:
    """Write the state of `parts` under the names that Keras 2 has for it."""
    model, optimizer, root = parts["model"], parts["optimizer"], tf.Module()
    renamed: dict[int, tf.Variable] = {}
    number = 0
    for layer in model.layers:
        if layer.weights:
            plain = tf.Module()
            for variable in layer.weights:
                copy = renamed[id(variable)] = tf.Variable(variable.value, name=variable.name)
                setattr(plain, variable.name, copy)
            setattr(root, f"layer_with_weights-{number}", plain)
            number += 1
    slots = tf.compat.v1.train.AdamOptimizer(0.1)
    trained = [renamed[id(variable)] for variable in model.trainable_variables]
    slots.apply_gradients([(tf.zeros_like(variable), variable) for variable in trained])
    for place, variable in enumerate(trained):
        slots.get_slot(variable, "m").assign(optimizer._momentums[place].value)
        slots.get_slot(variable, "v").assign(optimizer._velocities[place].value)
    own = {"iter": optimizer.iterations.value, "learning_rate": optimizer.learning_rate.value}
    for name, value in {**own, "beta_1": rate, "beta_2": 0.999, "decay": 0.0}.items():
        slots._track_trackable(tf.Variable(value), name)
    checkpoint = tf.train.Checkpoint(model=root, optimizer=slots, step=parts["step"])
    return checkpoint.write(str(prefix))


@pytest.mark.chaos
def test_slots_and_numbered_layers_of_keras_2_are_found_where_they_are_meant(
    old: tuple[Path, list[np.ndarray]], tmp_path: Path
) -> None:
    before, parts = build(), build()
    train(**before, count=3)
    prefix = as_keras_2(before, tmp_path / "keras2")
    # Those of the class whose slots these stand for are called otherwise here.
    allow = ["optimizer.beta1_power", "optimizer.beta2_power"]
    with unbroken.Run(tmp_path / "run", start_from=prefix, allow=allow, **parts) as run:
        assert run.started_from is not None
        assert equal(values(parts), values(before))
    other = as_keras_2(before, tmp_path / "other", rate=0.8)
    with (
        pytest.raises(StateMismatchError, match=r"beta_1: it is 0\.8 in the checkpoint, 0\.9 here"),
        unbroken.Run(tmp_path / "more", start_from=other, allow=allow, **build()),
    ):
        pass


def test_what_is_no_such_checkpoint_is_refused_in_words(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match=r"a checkpoint of tf\.train\.Checkpoint, found .*does not exist"),
        unbroken.Run(tmp_path / "run", start_from=tmp_path / "nowhere", step=tf.Variable(0)),
    ):
        pass
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("step", initializer=1)
        session.run(variable.initializer)
        prefix = tf.compat.v1.train.Saver().save(session, str(tmp_path / "model.ckpt"))
    with (
        pytest.raises(UsageError, match="that has names alone") as refused,
        unbroken.Run(tmp_path / "run", start_from=prefix, step=tf.Variable(0)),
    ):
        pass
    assert "warm_start" in refused.value.hint
