"""Models of Keras: all that is theirs is kept, and layers are told apart by where they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import quiet_tensorflow  # noqa: F401  isort: skip

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import unbroken
from unbroken.errors import StateMismatchError, UnsupportedStateError

from .scenes import batch, dense, restore, save, state_of, train, twins, values


class Blocks(keras.Model):
    """A model of a class of its own: layers in attributes, lists and mappings, one that is used twice."""

    def __init__(self, *, swapped: bool = False) -> None:
        super().__init__()
        first, second = layers.Dense(4), layers.Dense(4)
        self.one, self.two = (second, first) if swapped else (first, second)
        self.blocks = [layers.Dense(4, activation="tanh"), layers.LayerNormalization()]
        self.heads = {"left": layers.Dense(2), "right": keras.Sequential([layers.Dense(2)])}
        self.noise = layers.GaussianNoise(0.1)
        self.scale = self.add_weight(shape=(4,), initializer="ones", name="scale")

    def call(self, inputs: Any, training: bool = False) -> Any:
        hidden = self.noise(self.two(self.one(self.one(inputs))) * self.scale, training=training)
        for block in self.blocks:
            hidden = block(hidden)
        return self.heads["left"](hidden) + self.heads["right"](hidden)


def built(seed: int) -> Any:
    keras.utils.set_random_seed(seed)
    model = Blocks()
    model(np.zeros((1, 4), np.float32))
    return model


def functional(*, first: str | None = None, second: str | None = None) -> Any:
    inputs = keras.Input((4,))
    hidden = layers.Dense(4, name=first)(inputs)
    return keras.Model(inputs, layers.Dense(4, name=second)(hidden))


BATCH = (batch(1, 6, 4), batch(2, 6, 4))


def compiled(*metrics: str) -> Any:
    model = dense("a")
    model.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse", metrics=list(metrics))
    return model


def trained(steps: range, model: Any, optimizer: Any) -> list[str]:
    return train(model, optimizer, steps)


class TestExactness:
    """What goes on after a restore is bit for bit what would have gone on without it."""

    def test_a_model_of_a_class_of_its_own_and_its_optimizer_go_on(self, tmp_path: Path) -> None:
        def build(seed: int) -> dict[str, Any]:
            return {"model": built(seed), "optimizer": keras.optimizers.Adam(0.01)}

        twins(tmp_path, build, trained)
        names = [name for name in state_of(tmp_path) if not name.startswith("(")]
        assert "heads.left.kernel" in names
        assert "heads.right.dense.bias" in names
        assert "blocks.1.gamma" in names
        assert "scale" in names

    @pytest.mark.chaos
    def test_random_layers_and_statistics_go_on(self, tmp_path: Path) -> None:
        def build(seed: int) -> dict[str, Any]:
            keras.utils.set_random_seed(seed)
            model = keras.Sequential(
                [
                    keras.Input((2, 3)),
                    layers.LSTM(4, dropout=0.2, recurrent_dropout=0.2),
                    layers.Dropout(0.5),
                    layers.BatchNormalization(),
                    layers.GaussianDropout(0.2),
                    layers.Reshape((2, 2, 1)),
                    layers.RandomFlip(),
                    layers.Conv2D(2, 1),
                ]
            )
            return {"model": model, "optimizer": keras.optimizers.SGD(0.05, momentum=0.9)}

        def advance(steps: range, model: Any, optimizer: Any) -> list[str]:
            return train(model, optimizer, steps, 3, 2, 3)

        twins(tmp_path, build, advance)

    @pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=pytest.mark.chaos)])
    def test_a_compiled_model_brings_its_optimizer_and_its_metrics(
        self, tmp_path: Path, jit_compile: bool
    ) -> None:
        def build(seed: int) -> dict[str, Any]:
            keras.utils.set_random_seed(seed)
            model = keras.Sequential([keras.Input((4,)), layers.Dense(4), layers.Dropout(0.5)])
            model.compile(
                optimizer=keras.optimizers.Adam(0.01), loss="mse", metrics=["mae", keras.metrics.AUC()]
            )
            return {"model": model}

        def advance(steps: range, model: Any) -> Iterator[list[str]]:
            # Unlike train_on_batch this counts on from one batch to the next.
            step_once = tf.function(model.train_step, jit_compile=True) if jit_compile else model.train_step
            for step in steps:
                labels = (batch(step + 100, 6, 4) > 0).astype(np.float32)
                logs = step_once((batch(step, 6, 4) ** 2, labels))
                # What has no name is counted over the program.
                yield sorted(f"{name[:3]} {float(value).hex()}" for name, value in logs.items())

        twins(tmp_path, build, advance)


class TestMetrics:
    """What a compiled model makes with its first batch is kept until then, and compared when it is there."""

    def test_an_attempt_that_trains_nothing_keeps_what_waits(self, tmp_path: Path) -> None:
        model = compiled("mae")
        model.train_step(BATCH)
        save(tmp_path, model=model)
        idle = compiled("mae")
        with unbroken.Run(tmp_path, model=idle) as run:
            run.step()
        assert "(metrics).mae.total" in state_of(tmp_path)
        again = compiled("mae")
        lines = restore(tmp_path, model=again)
        assert not any("metrics" in line for line in lines)
        assert float(again.train_step(BATCH)["mae"]) == float(model.train_step(BATCH)["mae"])

    def test_other_metrics_are_refused_with_the_first_batch(self, tmp_path: Path) -> None:
        model = compiled("mae")
        model.train_step(BATCH)
        save(tmp_path, model=model)
        again = compiled("mse")
        with unbroken.Run(tmp_path, resume="must", model=again) as run:
            run.record(tried=1)
            with pytest.raises(StateMismatchError, match=r"\(metrics\)\.mae\.total: the model lacks it"):
                again.train_step(BATCH)


class TestAdapted:
    """What layers learn by adapt() is in force again, or refused where it cannot be."""

    def test_statistics_are_calculated_with_by_a_restore_and_a_warm_start(self, tmp_path: Path) -> None:
        def build(scale: float) -> Any:
            layer = layers.Normalization()
            layer.adapt(batch(1, 6, 4) * scale)
            return keras.Sequential([keras.Input((4,)), layer])

        model, again, warm = build(5.0), build(1.0), build(1.0)
        save(tmp_path, model=model)
        restore(tmp_path, model=again)
        unbroken.warm_start(warm, tmp_path)
        expected = np.asarray(model(batch(2, 6, 4)))
        np.testing.assert_array_equal(again(batch(2, 6, 4)), expected)
        np.testing.assert_array_equal(warm(batch(2, 6, 4)), expected)

    def test_another_vocabulary_is_refused(self, tmp_path: Path) -> None:
        def build(*words: str) -> Any:
            layer = layers.StringLookup()
            layer.adapt(list(words))
            inputs = keras.Input((1,), dtype="string")
            return keras.Model(inputs, layers.Embedding(8, 2)(layer(inputs)))

        save(tmp_path, model=build("a", "b", "b"))
        with pytest.raises(StateMismatchError, match=r"string_lookup: a vocabulary of 3 entries"):
            restore(tmp_path, model=build("a", "a", "b"))
        restore(tmp_path, model=build("b", "b", "a"))


class TestNotKept:
    """What nobody keeps is refused or said while the first step is done."""

    def test_an_optimizer_that_is_no_part_is_refused_with_the_way_to_it(self, tmp_path: Path) -> None:
        model = dense("a")
        model.d_opt = keras.optimizers.Adam(0.1)
        run = unbroken.Run(tmp_path, model=model)
        said = r"Adam that trains model\.a\.kernel .* d_opt=model\.d_opt"
        with pytest.raises(UnsupportedStateError, match=said), run:
            train(model, model.d_opt, range(1))
            run.step()
        assert "apply" not in vars(keras.optimizers.Optimizer)
        model = dense("a")
        model.d_opt = keras.optimizers.Adam(0.1)
        with unbroken.Run(tmp_path / "kept", model=model, d_opt=model.d_opt) as run:
            train(model, model.d_opt, range(1))
            run.step()

    def test_other_things_on_layers_that_change_are_pointed_out(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        model = built(1)
        model.fixed, model.weight, model.counts = 1.0, 1.0, {"seen": tf.Variable(0)}
        with unbroken.Run(tmp_path, model=model) as run:
            model.weight *= 0.5
            model.counts["seen"].assign_add(1)
            run.step()
        said = capsys.readouterr().err
        assert "not kept: model.weight" in said
        assert "not kept: model.counts.seen" in said
        assert "model.fixed" not in said


class TestStructure:
    """A layer is the one that is in its place; what Keras calls it by itself means nothing."""

    def test_automatic_names_do_not_matter(self, tmp_path: Path) -> None:
        model = functional()
        save(tmp_path, model=model)
        again = functional()
        assert [layer.name for layer in again.layers] != [layer.name for layer in model.layers]
        restore(tmp_path, model=again)
        assert values(again) == values(model)

    def test_layers_of_equal_shape_that_changed_places_are_refused_by_name(self, tmp_path: Path) -> None:
        save(tmp_path, model=functional(first="a", second="b"))
        again = functional(first="b", second="a")
        before = values(again)
        with pytest.raises(StateMismatchError, match=r"layers in the order b, a, in the checkpoint a, b"):
            restore(tmp_path, model=again)
        assert values(again) == before
        restore(tmp_path, model=again, allow=["model.(layers)"])

    def test_attributes_stand_for_layers_whatever_order_they_were_made_in(self, tmp_path: Path) -> None:
        keras.utils.set_random_seed(1)
        model, again = Blocks(), Blocks(swapped=True)
        for one in (model, again):
            one(np.zeros((1, 4), np.float32))
        save(tmp_path, model=model)
        restore(tmp_path, model=again)
        np.testing.assert_array_equal(again.one.kernel.numpy(), model.one.kernel.numpy())

    def test_a_layer_of_another_class_in_its_place_is_refused(self, tmp_path: Path) -> None:
        save(tmp_path, model=keras.Sequential([keras.Input((4,)), layers.LayerNormalization(name="norm")]))
        again = keras.Sequential([keras.Input((4,)), layers.GroupNormalization(2, name="norm")])
        with pytest.raises(StateMismatchError, match=r"norm: .*GroupNormalization, .*LayerNorm"):
            restore(tmp_path, model=again)

    def test_a_layer_that_is_set_otherwise_is_reported(self, tmp_path: Path) -> None:
        def build(rate: float) -> Any:
            return keras.Sequential([keras.Input((4,)), layers.Dense(4), layers.Dropout(rate)])

        save(tmp_path, model=build(0.5))
        lines = restore(tmp_path, model=build(0.25))
        assert any(
            "dropout rate: 0.25 of the script is used, the checkpoint has 0.5" in line for line in lines
        )

    def test_a_layer_that_is_shared_is_kept_once(self, tmp_path: Path) -> None:
        inputs = keras.Input((4,))
        shared = layers.Dense(4, name="shared")
        model = keras.Model(inputs, shared(shared(inputs)))
        save(tmp_path, model=model)
        assert [name for name in state_of(tmp_path) if "kernel" in name] == ["shared.kernel"]


class TestMismatches:
    """All that differs is named, and then nothing at all has changed."""

    def test_every_difference_is_listed_and_no_variable_is_touched(self, tmp_path: Path) -> None:
        save(tmp_path, model=dense("a", "b", "c"))
        again = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(4, name="a"),
                layers.Dense(5, name="b"),
                layers.Dense(5, name="d"),
            ]
        )
        before = values(again)
        with pytest.raises(StateMismatchError) as caught:
            restore(tmp_path, model=again)
        text = str(caught.value)
        assert "model: d.kernel: the checkpoint lacks it" in text
        assert "model: c.kernel: the model lacks it" in text
        assert "model: b.kernel: shape (4, 5), the checkpoint has shape (4, 4)" in text
        assert "nothing was changed" in text
        assert values(again) == before

    def test_fewer_layers_are_refused_unless_that_is_allowed(self, tmp_path: Path) -> None:
        model, again = dense("a", "b"), dense("a", seed=5)
        save(tmp_path, model=model)
        with pytest.raises(StateMismatchError, match=r"b\.kernel: the model lacks it"):
            restore(tmp_path, model=again)
        restore(tmp_path, model=again, allow=["model.b.*"])
        assert values(again) == values(model)[:2]

    def test_another_dtype_is_refused_and_cast_where_that_is_said(self, tmp_path: Path) -> None:
        def build(dtype: str) -> Any:
            return keras.Sequential([keras.Input((4,)), layers.Dense(4, dtype=dtype)])

        model, again = build("float64"), build("float16")
        save(tmp_path, model=model)
        with pytest.raises(
            StateMismatchError, match=r"kernel: dtype float16, the checkpoint has dtype float64"
        ):
            restore(tmp_path, model=again)
        restore(tmp_path, model=again, cast=["model.*"])
        expected = model.layers[0].kernel.numpy().astype(np.float16)
        np.testing.assert_array_equal(again.layers[0].kernel.numpy(), expected)

    def test_an_unbuilt_model_is_refused_with_the_call_to_make(self, tmp_path: Path) -> None:
        model = keras.Sequential([layers.Dense(4)])
        with pytest.raises(UnsupportedStateError, match=r"has not been built \(model") as caught:
            save(tmp_path, model=model)
        assert "call model.build(input_shape)" in caught.value.hint
        assert not (tmp_path / "checkpoints").exists()

    def test_a_layer_that_a_later_fit_trains_is_refused_with_the_way_out(self, tmp_path: Path) -> None:
        model = compiled()
        save(tmp_path, model=model)
        again = dense("a")
        again.layers[0].trainable = False
        again.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse")
        with pytest.raises(StateMismatchError, match=r"a later fit .* allow=\['model\.\(optimizer\)\*'\]"):
            restore(tmp_path, model=again)
        restore(tmp_path, model=again, allow=["model.(optimizer)*"])

    def test_a_layer_that_calls_do_not_use_is_refused_by_name(self, tmp_path: Path) -> None:
        model = functional()
        model.spare = layers.Dense(2)
        # It has neither variables nor a seed, however it is built.
        model.shape_only = layers.Flatten()
        with pytest.raises(UnsupportedStateError, match=r"in a model that has \(model\.spare\)") as caught:
            save(tmp_path, model=model)
        assert "call model.spare itself" in caught.value.hint

    def test_a_seed_that_no_layer_wants_any_more_is_left_out_and_said(self, tmp_path: Path) -> None:
        def build(rate: float) -> Any:
            return keras.Sequential([keras.Input((4,)), layers.Dropout(rate)])

        save(tmp_path, model=build(0.5))
        lines = restore(tmp_path, model=build(0.0))
        assert any("(seeds).dropout.seed_generator: left out" in line for line in lines)

    def test_a_model_that_is_not_compiled_does_not_lose_its_optimizer_without_a_word(
        self, tmp_path: Path
    ) -> None:
        model = dense("a")
        model.compile(optimizer="adam", loss="mse")
        save(tmp_path, model=model)
        again = dense("a")
        with pytest.raises(StateMismatchError, match=r"the model is not compiled: call compile"):
            restore(tmp_path, model=again)
        restore(tmp_path, model=again, allow=["model.(optimizer)", "fit"])
        assert values(again) == values(model)

    def test_layers_that_were_frozen_are_so_again_unless_the_script_wins(self, tmp_path: Path) -> None:
        model = dense("a", "b")
        model.layers[0].trainable = False
        save(tmp_path, model=model)
        again = dense("a", "b")
        lines = restore(tmp_path, model=again)
        assert [layer.trainable for layer in again.layers] == [False, True]
        assert any("frozen: ['a'] is kept, the script sets []" in line for line in lines)
        free = dense("a", "b")
        restore(tmp_path, model=free, override=["model.frozen"])
        assert [layer.trainable for layer in free.layers] == [True, True]


class TestNames:
    """Other names are said by rename=, and a model begins with the weights of another by warm_start."""

    def test_renamed_layers_are_refused_with_the_map_that_fits_them(self, tmp_path: Path) -> None:
        model = dense("old", None)
        model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
        train(model, model.optimizer, range(1))
        save(tmp_path, model=model)
        again = dense("new", None, seed=3)
        again.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
        said = r"new\.kernel: the checkpoint lacks it; .* rename=\{'model\.old': 'model\.new'\}"
        with pytest.raises(StateMismatchError, match=said):
            restore(tmp_path, model=again)
        restore(tmp_path, model=again, rename={"model.old": "model.new"})
        assert values(again, again.optimizer) == values(model, model.optimizer)

    def test_a_part_under_another_name_is_refused_with_both_and_goes_on_under_the_new_one(
        self, tmp_path: Path
    ) -> None:
        model, optimizer = dense("a"), keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
        train(model, optimizer, range(2))
        save(tmp_path, net=model, optimizer=optimizer)
        again, other = dense("a", seed=3), keras.optimizers.Adam(0.01)
        with pytest.raises(StateMismatchError) as caught:
            restore(tmp_path, model=again, optimizer=other)
        assert "model: the checkpoint lacks this part" in str(caught.value)
        assert "net: the program lacks this part" in str(caught.value)
        restore(tmp_path, model=again, optimizer=other, rename={"net": "model"})
        assert values(again, other) == values(model, optimizer)

    def test_a_warm_start_takes_the_weights_of_a_run_and_nothing_else(self, tmp_path: Path) -> None:
        model = keras.Sequential([keras.Input((4,)), layers.Dense(4, name="a"), layers.Dropout(0.5)])
        save(tmp_path, model=model)
        again = dense("a", seed=4)
        report = unbroken.warm_start(again, tmp_path)
        assert report.matched.tensors == 2
        assert values(again) == values(model)[:2]
        other = dense("a", "head", seed=4)
        with pytest.raises(StateMismatchError, match=r"head\.kernel: the source lacks it"):
            unbroken.warm_start(other, tmp_path)
        unbroken.warm_start(other, tmp_path, allow=["head.*"])
