"""Handwritten digits in TensorFlow: a loop of one's own over tf.data that no interruption can change.

python examples/tensorflow_loop/train.py --run-dir runs/digits
unbroken run -- python examples/tensorflow_loop/train.py
"""

import argparse

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import unbroken


def augmented(image, label, seed):
    """Shift and add noise in a new way each time: the seed comes with the data, and goes on with them."""
    seed = tf.cast(tf.stack([seed, seed // 2**31]), tf.int32)
    shift = tf.random.stateless_uniform((2,), seed, -1, 2, tf.int32)
    noise = tf.random.stateless_normal((8, 8, 1), seed, stddev=0.1)
    return tf.roll(image, shift, axis=(0, 1)) + noise, label


def build_model():
    return keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.2, seed=1),
            keras.layers.Dense(10),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on handwritten digits with TensorFlow.")
    parser.add_argument("--run-dir", help="where the run is kept; under `unbroken run` it says so itself")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    tf.config.threading.set_intra_op_parallelism_threads(1)  # With more, sums may come in another order.
    keras.utils.set_random_seed(options.seed)
    pixels, classes = load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    order = np.random.default_rng(0).permutation(len(images))
    test, train = order[:360], order[360:]

    digits = tf.data.Dataset.from_tensor_slices((images[train], classes[train])).shuffle(len(train), seed=2)
    seeds = tf.data.Dataset.random(seed=3, rerandomize_each_iteration=True)
    dataset = (
        tf.data.Dataset.zip((digits, seeds))
        .map(lambda sample, seed: augmented(*sample, seed), num_parallel_calls=tf.data.AUTOTUNE)
        .batch(32)
        .prefetch(tf.data.AUTOTUNE)
    )
    model = build_model()
    optimizer = keras.optimizers.AdamW(3e-3)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def train_step(batch, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(batch, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    with unbroken.Run(
        options.run_dir,
        save=[unbroken.EverySteps(options.save_every)],
        keep=[unbroken.KeepLast(3), unbroken.KeepBest(1, "accuracy")],
        config={"epochs": options.epochs, "seed": options.seed},
        model=model,
        optimizer=optimizer,
    ) as run:
        for epoch in run.epochs(options.epochs):
            for batch, labels in run.batches(dataset):
                run.step(loss=float(train_step(batch, labels)))
            found = np.argmax(model(images[test], training=False), axis=1)
            score = float(np.mean(found == classes[test]))
            run.record(accuracy=score)
            print(f"epoch {epoch}: accuracy {score:.3f}")


if __name__ == "__main__":
    main()
