"""Handwritten digits by `model.fit` of Keras, with one callback that no interruption can get past.

python examples/keras_fit/train.py --run-dir runs/digits
unbroken run -- python examples/keras_fit/train.py
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import unbroken


def build_model() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            *(layers.RandomTranslation(0.1, 0.1, fill_mode="constant"), layers.GaussianNoise(0.1)),
            *(layers.Conv2D(16, 3, padding="same", activation="relu"), layers.MaxPooling2D()),
            *(layers.Conv2D(32, 3, padding="same", activation="relu"), layers.BatchNormalization()),
            *(layers.Flatten(), layers.Dropout(0.3), layers.Dense(10)),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(3e-3), loss, metrics=["accuracy"])
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on handwritten digits by model.fit.")
    parser.add_argument("--run-dir", help="where the run is kept; under `unbroken run` it says so itself")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    keras.utils.set_random_seed(options.seed)
    pixels, classes = load_digits(return_X_y=True)
    images = (pixels / 16).astype("float32").reshape(-1, 8, 8, 1)
    order = np.random.default_rng(0).permutation(len(images))
    test, train = order[:360], order[360:]

    model = build_model()
    with unbroken.Run(
        options.run_dir,
        save=[unbroken.EverySteps(options.save_every)],
        keep=[unbroken.KeepLast(3), unbroken.KeepBest(1, "val_accuracy")],
        config={"epochs": options.epochs, "seed": options.seed},
        model=model,
    ) as run:
        model.fit(
            images[train],
            classes[train],
            batch_size=32,
            epochs=options.epochs,
            validation_data=(images[test], classes[test]),
            verbose=2,
            callbacks=[
                keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=2),
                keras.callbacks.EarlyStopping("val_loss", patience=5),
                unbroken.keras.Checkpoint(run),
            ],
        )


if __name__ == "__main__":
    main()
