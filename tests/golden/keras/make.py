"""Makes the files beside it with Keras and h5py; `versions.json` says which.

They are kept as they were made: run this in a copy to make others.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import h5py
import keras
import numpy as np

HERE = Path(__file__).parent


def trained() -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, name="first"),
            keras.layers.Dropout(0.5),
            keras.layers.BatchNormalization(),
            keras.layers.Lambda(lambda x: 2 * x, output_shape=(4,), name="twice"),
            keras.layers.Dense(2),
        ],
        name="small",
    )
    model.compile("adam", "mse")
    model.fit(np.ones((4, 3), "float32"), np.ones((4, 2), "float32"), verbose=0)
    return model


def odd(path: Path, version: str) -> None:
    """Write what Keras has no use for: other kinds of numbers, links of every kind, numbers elsewhere."""
    with h5py.File(path, "w", libver=version) as file:
        file["big"] = np.arange(3, dtype=">f8")
        file["complex"] = np.array([1 + 2j], ">c8")
        file["flags"] = np.array([True, False])
        file["same"] = file["flags"]
        file["soft"] = h5py.SoftLink("/flags")
        file["text"] = "hello"
        file["nothing"] = h5py.Empty("f4")
        file.create_dataset("pieces", data=np.arange(20.0), chunks=(5,), compression="gzip")
        inner = file.create_group("inner")
        inner["numbers"] = np.arange(4, dtype="u2")
        inner["up"] = file["/"]
        file.create_dataset("elsewhere", shape=(4,), dtype="f4", external=[("/etc/passwd", 0, 16)])
        file.create_group("far")["away"] = h5py.ExternalLink("other.h5", "/x")
        if version == "latest":
            layout = h5py.VirtualLayout(shape=(4,), dtype="f4")
            layout[:] = h5py.VirtualSource("other.h5", "x", shape=(4,))
            file.create_virtual_dataset("virtual", layout)


if __name__ == "__main__":
    model = trained()
    model.save_weights(HERE / "small.weights.h5")
    model.save(HERE / "small.keras")
    model.save(HERE / "small-legacy.h5")
    odd(HERE / "odd-earliest.h5", "earliest")
    odd(HERE / "odd-latest.h5", "latest")
    versions = {"keras": keras.__version__, "h5py": h5py.__version__, "hdf5": h5py.version.hdf5_version}
    (HERE / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")
