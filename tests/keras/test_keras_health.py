"""The health of what Keras trains: rates that are watched and lowered, and numbers that are not finite."""

from __future__ import annotations

from typing import Any

from .. import quiet_tensorflow  # noqa: F401  isort: skip

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, optimizers

from unbroken.frameworks.keras.family import FAMILY

from .scenes import batch, dense


def stepped(parts: dict[str, Any], factor: float) -> list[np.ndarray[Any, Any]]:
    """Return the kernels after a step, with the rate lowered by `factor`, and after one more without."""
    model, optimizer = parts["model"], parts["optimizer"]
    factors = [factor, 1.0, 1.0]
    lowered, unknown = FAMILY.lower_rates(parts, lambda: factors[0])
    assert lowered is not None
    assert unknown == []
    found = []
    for step in range(2):
        model.train_on_batch(batch(step, 6, 4), batch(step + 9, 6, 4))
        # Nobody else sees the lower rate.
        assert float(optimizer.learning_rate) == pytest.approx(0.1)
        found.append(model.layers[0].kernel.numpy())
        factors.pop(0)
        lowered.refresh()
    lowered.close()
    return found


def compiled(rate: Any) -> dict[str, Any]:
    model = dense("a")
    model.compile(optimizer=optimizers.SGD(rate), loss="mse")
    return {"model": model, "optimizer": model.optimizer}


def test_rates_are_lower_inside_steps_and_nowhere_else() -> None:
    parts = compiled(0.1)
    first = parts["model"].layers[0].kernel.numpy()
    # Compiled before: it is compiled anew.
    parts["model"].make_train_function()
    lowered = stepped(parts, 0.5)
    plain = compiled(optimizers.schedules.PiecewiseConstantDecay([50], [0.1, 0.1]))
    full = stepped(plain, 1.0)
    np.testing.assert_allclose((lowered[0] - first) * 2, full[0] - first, rtol=1e-4, atol=1e-6)
    assert "_get_current_learning_rate" not in vars(parts["optimizer"])


def test_the_highest_rate_is_that_of_all_optimizers() -> None:
    parts = {**compiled(0.1), "other": optimizers.Adam(0.3)}
    assert FAMILY.highest_rate(parts)() == 0.3
    assert not FAMILY.has_scaler(parts)
    scaling = optimizers.LossScaleOptimizer(optimizers.SGD(0.7))
    assert FAMILY.highest_rate({"scaling": scaling})() == 0.7
    assert FAMILY.has_scaler({"scaling": scaling})


def test_the_first_layer_whose_output_is_not_finite_is_named() -> None:
    class Log(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return tf.math.log(inputs * 0 - 1)

    model = keras.Sequential([keras.Input((4,)), layers.Dense(4), Log(name="log"), layers.Dense(4)])
    model.compile(optimizer=optimizers.SGD(0.1), loss="mse")
    parts = {"model": model}
    assert FAMILY.bad_tensors(parts) == []
    with FAMILY.step_watch(parts, [], None, runs_eagerly=True) as watch:
        model.train_on_batch(batch(1, 6, 4), batch(2, 6, 4))
    assert watch.found.module == "model.log"
    assert watch.found.are_inputs_finite
    assert "the gradient of model.dense_1.kernel" in watch.gradients
    assert "model.dense_1.kernel" in FAMILY.bad_tensors(parts)
    assert not tf.config.functions_run_eagerly()
    assert "call" not in vars(model.layers[0])


def test_rows_of_a_batch_that_are_not_finite_are_found() -> None:
    inputs = batch(1, 6, 4)
    inputs[3, 1] = np.inf
    targets = batch(2, 6)
    targets[5] = np.nan
    assert FAMILY.bad_rows((tf.constant(inputs), {"y": targets}), 6) == [3, 5]
