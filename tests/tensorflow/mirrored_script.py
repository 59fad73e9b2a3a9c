"""Training in step on two devices, with everything that may differ between them.

    python mirrored_script.py RUN_DIR LAST_STEP [END_AT SIGNAL]

trains to the step LAST_STEP; right after END_AT it gets the signal of that number.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
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
import tensorflow as tf

import unbroken

BATCH, SAMPLES = 4, 20


def variable(value: Any, aggregation: str) -> tf.Variable:
    """Return a variable of which each replica changes its own copy."""
    return tf.Variable(
        value,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=getattr(tf.VariableAggregation, aggregation),
    )


@dataclass
class Training:
    """All that trains: the parts of the run, and the step over all replicas."""

    strategy: tf.distribute.Strategy
    parts: dict[str, Any]

    @classmethod
    def built(cls, devices: int = 2, seed: int = 5) -> Training:
        keras.utils.set_random_seed(seed)
        strategy = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(devices)])
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((3,)),
                    keras.layers.BatchNormalization(),
                    keras.layers.Dropout(0.3),
                    keras.layers.Dense(1),
                ]
            )
            optimizer = keras.optimizers.SGD(1e-2, momentum=0.9)
            optimizer.build(model.trainable_variables)
            counts = {
                "samples": variable(tf.zeros((), tf.int64), "SUM"),
                "total": variable(0.0, "SUM"),
                "mean": variable(0.0, "MEAN"),
                "first": variable(0.0, "ONLY_FIRST_REPLICA"),
            }
            parts = {
                "model": model,
                "optimizer": optimizer,
                "error": keras.metrics.MeanSquaredError(),
                "counts": tf.train.Checkpoint(**counts),
            }
        return cls(strategy, parts)

    def step(self) -> Any:
        model, optimizer = self.parts["model"], self.parts["optimizer"]
        error, counts = self.parts["error"], self.parts["counts"]

        def on_replica(values: Any) -> Any:
            inputs, targets = values[:, :3], values[:, 3:]
            with tf.GradientTape() as tape:
                outputs = model(inputs, training=True)
                loss = tf.reduce_mean((outputs - targets) ** 2)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            error.update_state(targets, outputs)
            counts.samples.assign_add(tf.shape(values, tf.int64)[0])
            for each in (counts.total, counts.mean, counts.first):
                each.assign_add(tf.reduce_sum(inputs) / 7)
            return loss

        @tf.function
        def step(values: Any) -> Any:
            return self.strategy.reduce("MEAN", self.strategy.run(on_replica, args=(values,)), axis=None)

        return step

    def shared_out(self, batch: Any) -> Any:
        """Return the share that each replica gets of a batch."""

        def share(context: tf.distribute.experimental.ValueContext) -> Any:
            return tf.split(batch, context.num_replicas_in_sync)[context.replica_id_in_sync_group]

        return self.strategy.experimental_distribute_values_from_function(share)


def data() -> tf.data.Dataset:
    samples = tf.random.stateless_uniform((SAMPLES, 4), [3, 4])
    return tf.data.Dataset.from_tensor_slices(samples).shuffle(SAMPLES, seed=9).batch(BATCH)


def train(training: Training, directory: Path, last: int, end_at: int = 0, number: int = 0) -> None:
    batches, step = data(), training.step()
    with unbroken.Run(directory, save=[unbroken.EverySteps(3)], **training.parts) as run:
        for _ in run.epochs(1000):
            for batch in run.batches(batches):
                run.step(loss=float(step(training.shared_out(batch))))
                if run.step_count == end_at:
                    os.kill(os.getpid(), number)
                if run.step_count == last:
                    return


if __name__ == "__main__":
    train(Training.built(), Path(sys.argv[1]), int(sys.argv[2]), *map(int, sys.argv[3:]))
