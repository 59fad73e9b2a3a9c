"""A fit that notes each step and kills its own process after some: fit_script.py DIRECTORY LEDGER STEPS."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import keras
import numpy as np

import unbroken

DIRECTORY, LEDGER, STEPS = sys.argv[1], sys.argv[2], int(sys.argv[3])
ROWS = np.random.RandomState(0).rand(20, 4).astype("float32")


class Ledger(keras.callbacks.Callback):
    """Notes each step and its loss, and lets nobody clear up after the last one."""

    def __init__(self) -> None:
        super().__init__()
        self._left = STEPS

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        with open(LEDGER, "a") as file:
            file.write(f"{self._epoch} {batch} {logs['loss']!r}\n")
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.3), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", jit_compile=False)
with unbroken.Run(DIRECTORY, save=[unbroken.EverySteps(2)], model=model) as run:
    use = [
        keras.callbacks.EarlyStopping("loss", patience=1),
        keras.callbacks.CSVLogger(f"{DIRECTORY}.csv"),
        Ledger(),
        unbroken.keras.Checkpoint(run),
    ]
    model.fit(ROWS, ROWS.sum(axis=1), batch_size=6, epochs=3, verbose=0, callbacks=use)
np.savez(
    f"{DIRECTORY}.npz", *[variable.numpy() for variable in (*model.variables, *model.optimizer.variables)]
)
