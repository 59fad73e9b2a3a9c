"""Dropout, a shuffled dataset and Adam until PLACE/last-step says so: `python supervised_script.py PLACE`.

The run directory is that of the supervisor, else PLACE/run. A checkpoint is being written nearly always.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import keras
import tensorflow as tf

import unbroken
from unbroken.rundir import layout

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)


def last_step(place: Path) -> int:
    path = place / "last-step"
    return int(path.read_text()) if path.exists() else sys.maxsize


def main(place: Path) -> None:
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(300, activation="tanh"),
            keras.layers.Dropout(0.4),
            keras.layers.Dense(300),
            keras.layers.Dense(1),
        ]
    )
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
    samples = tf.random.stateless_uniform((40, 6), [1, 2])
    dataset = tf.data.Dataset.from_tensor_slices(samples).shuffle(16, seed=5).batch(8)

    @tf.function
    def train(batch: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(batch, training=True) - 0.5) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    directory = None if layout.RUN_DIR_VARIABLE in os.environ else place / "run"
    with unbroken.Run(directory, save=[unbroken.EverySteps(2)], model=model, optimizer=optimizer) as run:
        for _ in run.epochs(1_000_000):
            for batch in run.batches(dataset):
                run.step(loss=float(train(batch)))
                if run.step_count >= last_step(place):
                    return


if __name__ == "__main__":
    main(Path(sys.argv[1]))
