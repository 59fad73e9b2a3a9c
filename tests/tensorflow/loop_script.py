"""A loop of one's own with every kind of randomness: `loop_script.py DIRECTORY --kill-at 7`.

Its seed differs in every process once the run exists: what is not restored shows in the losses.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import unbroken

EPOCHS, BATCHES, SIZE = 3, 5, 4


class Net(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernels = [tf.Variable(tf.random.normal((6, 6))), tf.Variable(tf.random.normal((6, 1)))]
        self.noise = tf.random.Generator.from_seed(random.randrange(1000))
        self.calls = 0

    def __call__(self, inputs: tf.Tensor) -> tf.Tensor:
        hidden = tf.tanh(inputs @ self.kernels[0])
        keep = tf.cast(self.noise.uniform(tf.shape(hidden)) > 0.3, tf.float32)
        return (hidden * keep) @ self.kernels[1]


class Momentum(tf.Module):
    """Stochastic gradient descent by hand."""

    def __init__(self, trained: list[tf.Variable]) -> None:
        super().__init__()
        self.trained = trained
        self.moments = [tf.Variable(tf.zeros_like(variable), trainable=False) for variable in trained]
        self.steps = tf.Variable(0, dtype=tf.int64)

    def apply(self, gradients: list[tf.Tensor]) -> None:
        for variable, moment, gradient in zip(self.trained, self.moments, gradients, strict=True):
            moment.assign(0.9 * moment + gradient)
            variable.assign_sub(0.01 * moment)
        self.steps.assign_add(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kill-at", type=int, default=-1)
    wanted = parser.parse_args()
    # The order of a dataset follows from the seed that is set when it is made, too: that stays.
    tf.random.set_seed(7)
    data = np.linspace(-1, 1, BATCHES * SIZE * 6, dtype="f4").reshape(-1, 6)
    dataset = tf.data.Dataset.from_tensor_slices(data).shuffle(8, seed=3).batch(SIZE)
    seed = os.getpid() if any(wanted.directory.glob("checkpoints/step-*")) else 7
    keras.utils.set_random_seed(seed)
    tf.random.get_global_generator().reset_from_seed(seed)
    net = Net()
    optimizer = Momentum(net.kernels)

    @tf.function
    def train(inputs: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(net(inputs) - 0.5))
        optimizer.apply(tape.gradient(loss, net.kernels))
        return loss

    state = {"smooth": tf.constant(0.0), "best": None}
    parts = {"net": net, "optimizer": optimizer, "state": state}
    with unbroken.Run(wanted.directory, **parts, save=[unbroken.EverySteps(2)]) as run:
        for _ in run.epochs(EPOCHS):
            for batch in run.batches(dataset):
                noise = tf.random.uniform(batch.shape) + tf.random.get_global_generator().normal(batch.shape)
                noise += keras.random.normal(batch.shape) + random.random() + float(np.random.rand())
                loss = train(batch + 0.1 * tf.random.shuffle(noise))
                net.calls += 1
                state["smooth"] = 0.9 * state["smooth"] + 0.1 * loss
                state["best"] = min(state["best"] or 1e9, float(loss))
                if run.step_count + 1 == wanted.kill_at:
                    run._saver.wait()
                    os.kill(os.getpid(), signal.SIGKILL)
                run.step(loss=loss, smooth=state["smooth"])


main()
