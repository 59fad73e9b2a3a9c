"""Makes the files beside it with TensorFlow and Keras: versions.json says which, expected.json what is read.

They are kept as they were made: run this in a copy to make others.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import ml_dtypes
import numpy as np
import tensorflow as tf

HERE = Path(__file__).parent
FLOAT8 = tf.dtypes.experimental
v1 = tf.compat.v1


def kinds() -> tf.Module:
    """Return a variable of every type that a variable can have, and one deep inside."""
    module = tf.Module()
    values = {
        "bf16": tf.constant([1.5, -2.0], tf.bfloat16),
        "f16": tf.constant([1.5, -2.0], tf.float16),
        "f64": tf.constant(2.5, tf.float64),
        "f8": tf.cast(tf.constant([1.5, -2.0]), FLOAT8.float8_e4m3fn),
        "f8_wide": tf.cast(tf.constant([1.5, -2.0]), FLOAT8.float8_e5m2),
        "i4": tf.cast(tf.constant([1, -3, 7]), FLOAT8.int4),
        "u16": tf.constant([1, 65535], tf.uint16),
        "u64": tf.constant([1 << 63], tf.uint64),
        "flag": tf.constant([True, False]),
        "complex64": tf.constant([1 + 2j], tf.complex64),
        "complex128": tf.constant([1 + 2j], tf.complex128),
        "text": tf.constant(["", "one", "zwei \N{SNOWMAN}" * 40]),
        "empty": tf.zeros((0, 3)),
    }
    for name, value in values.items():
        setattr(module, name, tf.Variable(value, name=f"kind_{name}"))
    module.inner = tf.Module()
    module.inner.rows = [tf.Variable([1.0]), tf.Variable([2.0, 3.0])]
    module.again = module.inner.rows[1]
    return module


def objects() -> str:
    """Save a Keras model that was trained, and all that a script has beside it, twice."""
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dense(4, name="first"),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(2, name="second"),
    ]
    model = keras.Sequential([keras.Input((3,)), *layers], name="small")
    optimizer = keras.optimizers.Adam(0.01)
    data = iter(tf.data.Dataset.range(40).shuffle(10, seed=1).batch(4))
    checkpoint = tf.train.Checkpoint(
        model=model, optimizer=optimizer, step=tf.Variable(0, dtype=tf.int64), data=data, kinds=kinds()
    )
    manager = tf.train.CheckpointManager(checkpoint, str(HERE / "objects"), max_to_keep=2)
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(tf.ones((5, 3)), training=True) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        checkpoint.step.assign_add(1)
        next(data)
        manager.save()
    return str(manager.latest_checkpoint)


def slots() -> str:
    """Save what an optimizer keeps beside the variables, as optimizers before Keras 3 do."""
    weight = tf.Variable([[1.0, 2.0]], name="layer/weight")
    optimizer = v1.train.AdamOptimizer(0.5)
    optimizer.apply_gradients([(tf.ones((1, 2)), weight)])
    return str(tf.train.Checkpoint(net=weight, optimizer=optimizer).write(str(HERE / "slots")))


def names() -> str:
    """Save variables by their names, one of them in pieces, with a device for each of two files."""
    with tf.Graph().as_default(), v1.Session() as session:
        v1.disable_resource_variables()
        with v1.variable_scope("encoder", partitioner=v1.fixed_size_partitioner(2)), tf.device("/cpu:0"):
            v1.get_variable("w", shape=(4, 3), initializer=v1.random_normal_initializer(seed=1))
        with v1.variable_scope("wide", partitioner=v1.fixed_size_partitioner(3, axis=1)), tf.device("/cpu:1"):
            v1.get_variable("w", shape=(2, 5), initializer=v1.random_normal_initializer(seed=2))
        bias = v1.get_variable("bias", initializer=np.arange(3, dtype=np.float32))
        step = v1.train.get_or_create_global_step()
        train = v1.train.MomentumOptimizer(0.5, 0.9).minimize(v1.reduce_sum(bias**2), global_step=step)
        session.run(v1.global_variables_initializer())
        session.run(train)
        (HERE / "names").mkdir(exist_ok=True)
        saver = v1.train.Saver(sharded=True, save_relative_paths=True)
        path = saver.save(session, str(HERE / "names/model.ckpt"), global_step=5, write_meta_graph=False)
        old = v1.train.Saver(write_version=v1.train.SaverDef.V1, save_relative_paths=True)
        old.save(session, str(HERE / "single"), write_meta_graph=False, write_state=False)
        return str(path)


def expected(prefix: str) -> dict[str, Any]:
    """Return what TensorFlow reads, by key: the type, the shape and the bytes."""
    reader = tf.train.load_checkpoint(prefix)
    types = reader.get_variable_to_dtype_map()
    found = {}
    for key, shape in sorted(reader.get_variable_to_shape_map().items()):
        if types[key] in (tf.string, tf.variant):
            found[key] = [types[key].name, shape, None]
            continue
        value = np.asarray(reader.get_tensor(key))
        if value.dtype == ml_dtypes.int4:
            value = value.astype(np.int8)
        found[key] = [types[key].name, shape, value.tobytes().hex()]
    return found


def main() -> None:
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    found = {
        name: expected(make()) for name, make in (("objects", objects), ("slots", slots), ("names", names))
    }
    (HERE / "expected.json").write_text(json.dumps(found, indent=1) + "\n")
    versions = {library.__name__: library.__version__ for library in (tf, keras, np)}
    (HERE / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    main()
