"""Optimizers of Keras: what they keep belongs to variables by name, and another one is another thing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .. import quiet_tensorflow  # noqa: F401  isort: skip

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, optimizers
from keras.optimizers import schedules

import unbroken
from unbroken.errors import StateMismatchError, UnsupportedStateError

from .scenes import batch, dense, restore, save, state_of, train, twins, values

EVERY = {
    "sgd": lambda: optimizers.SGD(0.05),
    "momentum": lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True, clipnorm=1.0),
    "rmsprop": lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "adam": lambda: optimizers.Adam(0.01, amsgrad=True),
    "adamw": lambda: optimizers.AdamW(0.01, use_ema=True, ema_overwrite_frequency=4),
    "adadelta": lambda: optimizers.Adadelta(0.5),
    "adagrad": lambda: optimizers.Adagrad(0.05),
    "adamax": lambda: optimizers.Adamax(0.01),
    "adafactor": lambda: optimizers.Adafactor(0.01),
    "nadam": lambda: optimizers.Nadam(0.01),
    "ftrl": lambda: optimizers.Ftrl(0.05),
    "lion": lambda: optimizers.Lion(0.001),
    "lamb": lambda: optimizers.Lamb(0.01),
    "muon": lambda: optimizers.Muon(0.01),
    "accumulating": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "scaling": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01), dynamic_growth_steps=2),
    "cosine": lambda: optimizers.Adam(schedules.CosineDecay(0.1, 10, warmup_target=0.2, warmup_steps=2)),
    "schedule_free": lambda: optimizers.ScheduleFreeAdamW(0.01, warmup_steps=2),
    "several": lambda: optimizers.MultiOptimizer(optimizers.OptimizerMap(optimizers.Adam(0.01))),
    "pieces": lambda: optimizers.SGD(schedules.PiecewiseConstantDecay([2, 4], [0.1, 0.05, 0.01])),
}


@pytest.mark.chaos
def test_every_class_of_keras_is_among_those_that_are_tried() -> None:
    classes = {item for item in vars(optimizers).values() if isinstance(item, type)}
    tried = {type(build()) for build in EVERY.values()}
    assert classes - tried == {optimizers.Optimizer, optimizers.OptimizerMap}


# One of each way to keep something; all others take a while.
SOME = ("momentum", "adafactor", "nadam", "accumulating", "scaling", "cosine")


@pytest.mark.parametrize(
    "names", [SOME, pytest.param(tuple(EVERY), marks=pytest.mark.chaos)], ids=["some", "every"]
)
def test_optimizers_go_on_bit_for_bit(tmp_path: Path, names: tuple[str, ...]) -> None:
    def build(seed: int) -> dict[str, Any]:
        parts: dict[str, Any] = {}
        for name in names:
            kernel = keras.initializers.GlorotUniform(seed)
            layer = layers.Dense(3, use_bias=False, kernel_initializer=kernel)
            model, optimizer = keras.Sequential([keras.Input((4,)), layer]), EVERY[name]()
            optimizer.build(model.trainable_variables)
            parts |= {f"{name}_model": model, name: optimizer}
        return parts

    def advance(steps: range, **parts: Any) -> list[str]:
        for name in names:
            variables = parts[f"{name}_model"].trainable_variables
            for step in steps:
                parts[name].apply([tf.constant(batch(step, *one.shape)) for one in variables], variables)
        return []

    twins(tmp_path, build, advance)
    # What the optimizer itself leaves out of its list is kept, too.
    assert "u_product" in state_of(tmp_path, "nadam")["state"]["(own)"]


def pair(optimizer: Any, *names: str | None, steps: int = 2, seed: int = 0) -> dict[str, Any]:
    model = dense(*(names or ("a",)), seed=seed)
    if steps:
        train(model, optimizer, range(steps))
    return {"model": model, "optimizer": optimizer}


class TestOthers:
    """What was kept for one optimizer never gets into another."""

    def test_momentum_of_sgd_is_refused_by_lion(self, tmp_path: Path) -> None:
        save(tmp_path, **pair(optimizers.SGD(0.1, momentum=0.9)))
        again = pair(optimizers.Lion(1e-4), steps=0, seed=7)
        before = values(again["model"])
        said = r"optimizer: class keras\.Lion, the checkpoint has class keras\.SGD"
        with pytest.raises(StateMismatchError, match=said):
            restore(tmp_path, **again)
        assert values(again["model"]) == before
        assert again["optimizer"].learning_rate.numpy() == np.float32(1e-4)
        restore(tmp_path, **again, fresh=["optimizer"])

    def test_of_a_model_with_one_layer_more_each_difference_is_named(self, tmp_path: Path) -> None:
        save(tmp_path, **pair(optimizers.Adam(0.1), "a", "b"))
        again = pair(optimizers.Adam(0.1), "a", "b", "c", steps=0)
        with pytest.raises(StateMismatchError) as caught:
            restore(tmp_path, **again)
        for name in ("c.kernel", "c.bias"):
            assert f"model: {name}: the checkpoint lacks it" in str(caught.value)
            assert f"optimizer: model.{name}: the checkpoint lacks this variable" in str(caught.value)
        restore(tmp_path, **again, allow=["*c.kernel", "*c.bias"])

    def test_moments_go_where_their_layers_are_in_another_order(self, tmp_path: Path) -> None:
        def build(order: str) -> dict[str, Any]:
            inputs = keras.Input((4,))
            made = {name: layers.Dense(4, name=name) for name in order}
            hidden = made["b"](made["a"](inputs))
            model = keras.Model(inputs, hidden)
            optimizer = optimizers.Adam(0.1)
            # The order in which an optimizer was given what it trains is no identity.
            optimizer.build([variable for name in order for variable in made[name].trainable_variables])
            return {"model": model, "optimizer": optimizer}

        parts, again = build("ab"), build("ba")
        train(parts["model"], parts["optimizer"], range(2))
        save(tmp_path, **parts)
        restore(tmp_path, **again)
        expected = train(parts["model"], parts["optimizer"], range(2, 4))
        assert train(again["model"], again["optimizer"], range(2, 4)) == expected

    def test_it_is_built_where_one_model_is_there_and_else_refused_with_the_call_to_make(
        self, tmp_path: Path
    ) -> None:
        optimizer = optimizers.Adam()
        with pytest.raises(UnsupportedStateError) as caught:
            save(tmp_path, one=dense("a"), two=dense("b"), optimizer=optimizer)
        assert "optimizer.build(model.trainable_variables)" in caught.value.hint
        assert not optimizer.built

    def test_a_variable_that_belongs_to_no_part_is_refused(self, tmp_path: Path) -> None:
        parts = pair(optimizers.SGD(0.1), steps=1)
        with pytest.raises(UnsupportedStateError, match=r"belongs to no part"):
            save(tmp_path, model=dense("other"), optimizer=parts["optimizer"])

    def test_a_layer_that_was_frozen_after_it_was_trained_shows_in_what_is_trained(
        self, tmp_path: Path
    ) -> None:
        save(tmp_path, **pair(optimizers.Adam(0.1), "a", "b"))
        again = pair(optimizers.Adam(0.1), "a", "b", steps=0)
        again["model"].layers[0].trainable = False
        with pytest.raises(StateMismatchError, match=r"model\.a\.kernel: is trained in the checkpoint"):
            restore(tmp_path, **again)

    def test_it_trains_a_module_of_tensorflow_as_well(self, tmp_path: Path) -> None:
        def build(seed: int) -> dict[str, Any]:
            module = tf.Module()
            module.inner = {"weight": tf.Variable(batch(seed, 3))}
            optimizer = optimizers.Adam(0.1)
            optimizer.build(module.trainable_variables)
            return {"model": module, "optimizer": optimizer}

        parts, again = build(1), build(2)
        parts["optimizer"].apply([tf.constant(batch(3, 3))])
        save(tmp_path, **parts)
        assert "model.inner.weight" in state_of(tmp_path, "optimizer")["state"]
        restore(tmp_path, **again)
        assert values(again["optimizer"]) == values(parts["optimizer"])

    def test_one_that_copies_weights_when_it_is_built_begins_at_those_restored(self, tmp_path: Path) -> None:
        save(tmp_path, **pair(optimizers.SGD(0.1), steps=1))
        again = pair(optimizers.ScheduleFreeAdamW(0.1), steps=0, seed=7)
        restore(tmp_path, **again, fresh=["optimizer"])
        kernel = again["model"].layers[0].kernel
        np.testing.assert_array_equal(again["optimizer"]._momentums[0], kernel)


class Warmup(schedules.LearningRateSchedule):  # type: ignore[misc]
    """Wraps another schedule, and keeps a setting under another name than that of its argument."""

    def __init__(self, base: Any, warmup: Any) -> None:
        self.base, self.over = base, warmup

    def __call__(self, step: Any) -> Any:
        return self.base(step) / self.over

    def get_config(self) -> dict[str, Any]:
        return {"base": self.base, "warmup": self.over}


class TestSettings:
    """The settings of the checkpoint go on; what the script sets otherwise is said, and may win."""

    def test_the_learning_rate_is_kept_and_the_change_is_said(self, tmp_path: Path) -> None:
        save(tmp_path, **pair(optimizers.Adam(0.1)))
        again = pair(optimizers.Adam(1e-4, beta_1=0.8), steps=0)
        lines = restore(tmp_path, **again)
        assert again["optimizer"].learning_rate.numpy() == np.float32(0.1)
        assert again["optimizer"].beta_1 == 0.9
        assert any("learning_rate: 0.1 is kept, the script sets 0.0001" in line for line in lines)
        assert any("beta_1: 0.9 is kept, the script sets 0.8" in line for line in lines)

    def test_the_script_wins_where_it_says_so_and_only_once(self, tmp_path: Path) -> None:
        save(tmp_path, **pair(optimizers.Adam(0.1)))
        chosen = ["optimizer.learning_rate", "optimizer.beta_1"]
        again = pair(optimizers.Adam(1e-4, beta_1=0.8), steps=0)
        with unbroken.Run(tmp_path, **again, override=chosen) as run:
            assert again["optimizer"].learning_rate.numpy() == np.float32(1e-4)
            assert again["optimizer"].beta_1 == 0.8
            again["optimizer"].learning_rate = 0.5
            run.step()
        last = pair(optimizers.Adam(1e-4, beta_1=0.8), steps=0)
        restore(tmp_path, **last, override=chosen)
        assert last["optimizer"].learning_rate.numpy() == np.float32(0.5)

    def test_a_rate_that_training_moved_is_no_change_of_the_script(self, tmp_path: Path) -> None:
        parts = pair(optimizers.SGD(0.1), steps=0)
        with unbroken.Run(tmp_path, **parts) as run:
            parts["optimizer"].learning_rate = 0.01
            run.step()
        again = pair(optimizers.SGD(0.1), steps=0)
        lines = restore(tmp_path, **again)
        assert again["optimizer"].learning_rate.numpy() == np.float32(0.01)
        assert not any("learning_rate" in line for line in lines)

    @pytest.mark.chaos
    def test_a_schedule_of_another_length_is_a_choice(self, tmp_path: Path) -> None:
        parts = pair(optimizers.SGD(schedules.CosineDecay(0.1, 10)), steps=0)
        parts["optimizer"].iterations.assign(4)
        present = float(schedules.CosineDecay(0.1, 10)(4))

        def again() -> dict[str, Any]:
            return pair(optimizers.SGD(schedules.CosineDecay(0.1, 40)), steps=0)

        save(tmp_path / "none", **parts)
        with pytest.raises(StateMismatchError, match=r"decay_steps is 10 in the checkpoint, 40 in the"):
            restore(tmp_path / "none", **again())
        rates = {}
        for how in ("stretch", "hold"):
            save(tmp_path / how, **parts)
            one = again()
            restore(tmp_path / how, **one, horizon=how)
            rates[how] = float(one["optimizer"].learning_rate)
        assert rates == {
            "stretch": pytest.approx(float(schedules.CosineDecay(0.1, 40)(4))),
            "hold": pytest.approx(present),
        }
        # The run goes on with the rate that was held, at the next restart as well.
        assert [line for line in restore(tmp_path / "hold", **again()) if "held at" in line]

    def test_a_schedule_in_place_of_a_number_is_refused_until_the_script_is_to_win(
        self, tmp_path: Path
    ) -> None:
        save(tmp_path, **pair(optimizers.SGD(0.1)))
        again = pair(optimizers.SGD(schedules.CosineDecay(0.5, 10), nesterov=True), steps=0)
        said = r"optimizer: a keras\.CosineDecay as learning_rate, the checkpoint has a number"
        with pytest.raises(StateMismatchError, match=said):
            restore(tmp_path, **again)
        restore(tmp_path, **again, override=["optimizer.learning_rate"])
        assert float(again["optimizer"].learning_rate) < 0.5
        # The other settings are kept all the same.
        assert again["optimizer"].nesterov is False

    def test_a_rate_that_was_held_is_let_go_where_the_script_is_to_win(self, tmp_path: Path) -> None:
        def build(length: int) -> dict[str, Any]:
            return pair(optimizers.SGD(schedules.CosineDecay(0.1, length)), steps=0)

        save(tmp_path, **build(10))
        restore(tmp_path, **build(40), horizon="hold")
        assert any("override= with learning_rate takes" in line for line in restore(tmp_path, **build(40)))
        again = build(40)
        restore(tmp_path, **again, override=["optimizer.*"])
        assert again["optimizer"]._learning_rate.decay_steps == 40

    def test_a_schedule_inside_a_schedule_is_compared_and_put_back(self, tmp_path: Path) -> None:
        def build(length: int, warmup: float = 5.0, scale: float = 1.0) -> dict[str, Any]:
            rate = Warmup(schedules.CosineDecay(scale, length), np.float32(warmup))
            return pair(optimizers.SGD(rate), steps=0)

        save(tmp_path, **build(10))
        with pytest.raises(StateMismatchError, match=r"base\.decay_steps is 10 in the checkpoint, 40 in the"):
            restore(tmp_path, **build(40))
        with pytest.raises(StateMismatchError, match=r"setting warmup .* is 6\.0, .* 5\.0, and no attribute"):
            restore(tmp_path, **build(10, warmup=6.0))
        again = build(10, scale=2.0)
        lines = restore(tmp_path, **again)
        assert again["optimizer"]._learning_rate.base.initial_learning_rate == 1.0
        assert any("base.initial_learning_rate: 1.0 is kept" in line for line in lines)

    def test_variables_that_do_not_decay_are_compared(self, tmp_path: Path) -> None:
        def build(*excluded: str) -> dict[str, Any]:
            optimizer = optimizers.AdamW(0.1)
            optimizer.exclude_from_weight_decay(var_names=list(excluded))
            return pair(optimizer)

        save(tmp_path, **build("bias"))
        lines = restore(tmp_path, **build())
        assert any("without_weight_decay: [] of the script is used" in line for line in lines)

    def test_moments_follow_their_variables_to_another_dtype(self, tmp_path: Path) -> None:
        def build(dtype: str, steps: int) -> dict[str, Any]:
            model = keras.Sequential([keras.Input((4,)), layers.Dense(4, dtype=dtype, name="a")])
            optimizer = optimizers.SGD(0.1, momentum=0.9)
            train(model, optimizer, range(steps))
            return {"model": model, "optimizer": optimizer}

        parts, again = build("float64", 1), build("float32", 0)
        save(tmp_path, **parts)
        with pytest.raises(
            StateMismatchError, match=r"momentums: dtype float32, the checkpoint has dtype float64"
        ):
            restore(tmp_path, **again)
        restore(tmp_path, **again, cast=["model.a.*"])
        kept = parts["optimizer"].momentums[0].numpy().astype(np.float32)
        np.testing.assert_array_equal(again["optimizer"].momentums[0].numpy(), kept)


@pytest.mark.chaos
def test_mixed_precision_goes_on_with_its_loss_scale(tmp_path: Path) -> None:
    def build(seed: int) -> dict[str, Any]:
        keras.utils.set_random_seed(seed)
        model = keras.Sequential([keras.Input((4,)), layers.Dense(4, dtype="mixed_float16")])
        model.compile(optimizer="adam", loss="mse", run_eagerly=True)
        optimizer = optimizers.LossScaleOptimizer(optimizers.Adam(0.01), dynamic_growth_steps=2)
        optimizer.build(model.trainable_variables)
        return {"model": model, "optimizer": optimizer}

    def advance(steps: range, model: Any, optimizer: Any) -> list[str]:
        return [*train(model, optimizer, steps), str(float(optimizer.dynamic_scale))]

    twins(tmp_path, build, advance)


def test_part_by_part_with_what_a_compiled_model_has_is_kept_once(tmp_path: Path) -> None:
    model = dense("a")
    model.compile(optimizer=optimizers.SGD(0.1, momentum=0.9), loss="mse")
    model.optimizer.build(model.trainable_variables)
    save(tmp_path, model=model, optimizer=model.optimizer)
    assert not any(name.startswith("(optimizer)") for name in state_of(tmp_path))
    assert state_of(tmp_path, "optimizer")["state"]["model.a.kernel"].keys() == {"momentums"}
