"""Trains a small model of Keras on the backend of the environment, and prints what came of each step.

`backend_script.py DIRECTORY STEPS`: a run that is asked to stop after so many steps, and otherwise goes to 6.
"""

from __future__ import annotations

import sys

import keras
import numpy as np

import unbroken


def main(directory: str, last: int) -> None:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(4), keras.layers.Dropout(0.5), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
    with unbroken.Run(directory, model=model) as run:
        for step in range(run.step_count, last):
            draw = np.random.default_rng(step)
            inputs, targets = (draw.normal(size=(6, 4)).astype(np.float32) for _ in range(2))
            logs = model.train_on_batch(inputs, targets, return_dict=True)
            run.step()
            print(step, *(float(value).hex() for value in logs.values()))
    for variable in (*model.variables, *model.optimizer.variables):
        print(keras.ops.convert_to_numpy(variable).tobytes().hex())


main(sys.argv[1], int(sys.argv[2]))
