"""A fit on two devices in step, with all that may differ between them.

    python mirrored_fit.py DIRECTORY LEDGER STEPS DATA

trains on the DATA of that name and notes each step in LEDGER; after so many STEPS it kills its own process,
unless it is 0. With the DIRECTORY "" it is plain fit, in no run.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )

import keras
import numpy as np
import tensorflow as tf

import unbroken

X = np.random.RandomState(0).rand(20, 4).astype("float32")
Y = X.sum(axis=1, keepdims=True) + np.random.RandomState(1).rand(20, 1).astype("float32")


class Rows(keras.utils.PyDataset):
    """Batches by number, the last one smaller."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return X[index * 6 : index * 6 + 6], Y[index * 6 : index * 6 + 6]


def pipeline() -> Any:
    return tf.data.Dataset.from_tensor_slices((X, Y))


DATA: dict[str, Callable[[], dict[str, Any]]] = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": 6, "shuffle": False},
    "shuffled arrays": lambda: {"x": X, "y": Y, "batch_size": 6, "validation_data": (X, Y)},
    "a PyDataset": lambda: {"x": Rows(), "shuffle": False},
    "a pipeline": lambda: {"x": pipeline().batch(6)},
    "a pipeline of whole batches": lambda: {"x": pipeline().batch(6, drop_remainder=True)},
    "a shuffled pipeline": lambda: {"x": pipeline().shuffle(20, seed=3).batch(6)},
    "a pipeline over epochs": lambda: {"x": pipeline().batch(6).repeat(), "steps_per_epoch": 3},
}
# In the order that plain fit has, too: it draws none, nor is that of a PyDataset on two devices repeatable.
ORDERED = [name for name in DATA if "shuffled" not in name and "PyDataset" not in name]


class Ledger(keras.callbacks.Callback):
    """Notes each step and its logs, and ends by `die` after `steps`."""

    def __init__(self, ledger: dict[str, str], steps: int, die: Callable[[], None]) -> None:
        super().__init__()
        self._ledger, self._left, self._die = ledger, steps, die
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._ledger[f"{self._epoch} {batch}"] = repr(logs)
        self._left -= 1
        if self._left == 0:
            self._die()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def build(optimizer: Any = None, **options: Any) -> Any:
    keras.utils.set_random_seed(1)
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(1),
            ]
        )
        used = keras.optimizers.SGD(0.1, momentum=0.9) if optimizer is None else optimizer()
        model.compile(used, "mse", metrics=["mae"], **{"jit_compile": False, **options})
    return model


def copies(model: Any) -> list[bytes]:
    """Return the bytes of each copy of each variable."""
    found = []
    for variable in (*model.variables, *model.optimizer.variables):
        for copy in getattr(variable.value, "values", (variable.value,)):
            found.append(copy.numpy().tobytes())
    return found


def fit(directory: Path | None, model: Any, data: dict[str, Any], *others: Any, **options: Any) -> Any:
    """Return the history of a fit, in a run or, without a directory, in none."""
    wanted = {"epochs": 2, "verbose": 0, **data}
    if directory is None:
        return model.fit(callbacks=[*others], **wanted).history
    with unbroken.Run(directory, **{"save": [unbroken.EverySteps(1)], "model": model, **options}) as run:
        return model.fit(callbacks=[*others, unbroken.keras.Checkpoint(run)], **wanted).history


def main(directory: str, ledger: str, steps: str, name: str) -> None:
    class OnDisk(dict[str, str]):
        def __setitem__(self, key: str, value: str) -> None:
            with open(ledger, "a") as file:
                file.write(f"{key}: {value}\n")

    notes = Ledger(OnDisk(), int(steps), lambda: os.kill(os.getpid(), signal.SIGKILL))
    model = build(lambda: keras.optimizers.Adam(0.1))
    save = [unbroken.EverySteps(2)]
    history = fit(Path(directory) if directory else None, model, DATA[name](), notes, save=save)
    Path(f"{ledger}.end").write_text(repr((history, copies(model))))


if __name__ == "__main__":
    main(*sys.argv[1:])
