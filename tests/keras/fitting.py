"""A small model with all that makes an exact resume of fit hard, and ends of a process at chosen moments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .. import quiet_tensorflow  # noqa: F401 - first

import keras  # isort: skip
import numpy as np  # isort: skip

import unbroken  # isort: skip

X = np.random.RandomState(0).rand(20, 4).astype("float32")
Y = X.sum(axis=1, keepdims=True) + np.random.RandomState(1).rand(20, 1).astype("float32")


class DiedError(Exception):
    """Stands for the end of a process: nothing of the fit is done after it."""


class DiesAt(keras.callbacks.Callback):
    """Raises at the end of the `at`-th time that `moment` comes, as `epoch_end`; does nothing for None."""

    def __init__(self, moment: str | None = None, at: int = 0) -> None:
        super().__init__()
        if moment is not None:
            left = iter(range(at, 0, -1))

            def come(*_: Any, **__: Any) -> None:
                if next(left) == 1:
                    raise DiedError

            setattr(self, f"on_{moment}", come)


def build(*, dropout: float = 0.3, metrics: tuple[str, ...] = (), **options: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(dropout), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, "mse", metrics=[*metrics], **{"jit_compile": False, **options})
    return model


def state_of(model: keras.Model) -> list[Any]:
    return [variable.numpy() for variable in (*model.variables, *model.optimizer.variables)]


def is_same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(np.array_equal, one, other))


def run_of(directory: Path, model: keras.Model, **options: Any) -> unbroken.Run:
    return unbroken.Run(directory, **{"save": [unbroken.EverySteps(1)], "model": model, **options})
