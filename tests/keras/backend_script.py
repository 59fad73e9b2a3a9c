"""Trains a small model of Keras on the backend of the environment, and prints what came of it.

`backend_script.py DIRECTORY steps N`: steps of its own until N, of 6.
`backend_script.py DIRECTORY fit N [KIND]`: model.fit over 30 batches, with a validation after each ten,
killed as batch N begins. KIND is "shared": in order, over two devices of JAX; or "plain": the same without a
run.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import ExitStack

import keras
import numpy as np

import unbroken
import unbroken.keras


class Own(keras.Sequential):
    """A class of the user's."""


def make_model() -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(4), keras.layers.Dropout(0.5), keras.layers.BatchNormalization()]
    model = Own([keras.Input((4,)), *layers])
    model.held = keras.ops.ones(3)
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
    return model


def take_steps(directory: str, last: int) -> None:
    model = make_model()
    with unbroken.Run(directory, model=model) as run:
        for step in range(run.step_count, last):
            draw = np.random.default_rng(step)
            inputs, targets = (draw.normal(size=(6, 4)).astype(np.float32) for _ in range(2))
            logs = model.train_on_batch(inputs, targets, return_dict=True)
            run.step()
            print(step, *(float(value).hex() for value in logs.values()))
    show(model)


def fit(directory: str, last: int, kind: str = "") -> None:
    if kind:
        devices = keras.distribution.list_devices()
        keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
    model = make_model()
    draw = np.random.default_rng(0)
    inputs, targets = (draw.normal(size=(40, 4)).astype(np.float32) for _ in range(2))

    def kill(batch: int, logs: object) -> None:
        if run.step_count == last:
            os.kill(os.getpid(), signal.SIGKILL)

    with ExitStack() as stack:
        callbacks = []
        if kind != "plain":
            made = unbroken.Run(directory, save=[unbroken.EverySteps(2)], background=False, model=model)
            run = stack.enter_context(made)
            callbacks = [
                keras.callbacks.LambdaCallback(on_train_batch_begin=kill),
                unbroken.keras.Checkpoint(run),
            ]
        validation = (inputs[:8], targets[:8])
        fitted = model.fit(
            inputs,
            targets,
            batch_size=4,
            shuffle=not kind,
            epochs=3,
            verbose=0,
            validation_data=validation,
            callbacks=callbacks,
        )
    print(fitted.history)
    show(model)


def show(model: keras.Model) -> None:
    for variable in (*model.variables, *model.optimizer.variables):
        print(keras.ops.convert_to_numpy(variable).tobytes().hex())


{"steps": take_steps, "fit": fit}[sys.argv[2]](sys.argv[1], int(sys.argv[3]), *sys.argv[4:])
