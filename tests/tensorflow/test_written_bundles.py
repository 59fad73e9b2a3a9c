"""TensorFlow itself reads the bundles that are written here, and what it writes is read as it is meant."""

from __future__ import annotations

from .. import quiet_tensorflow  # noqa: F401  isort: skip

from pathlib import Path

import numpy as np
import tensorflow as tf

from unbroken.inspection.conversion import convert
from unbroken.inspection.detect import open_checkpoint

from ..inspection.bundles import GOLDEN

FOREIGN = Path(__file__).resolve().parents[1] / "golden/foreign"


def test_tensorflow_reads_every_bit_of_a_bundle_that_was_converted(tmp_path: Path) -> None:
    for name, path in {"objects": GOLDEN / "objects", "torch": FOREIGN / "training.pt"}.items():
        source = open_checkpoint(path)
        convert(source, tmp_path / f"{name}.index")
        reader = tf.train.load_checkpoint(str(tmp_path / name))
        shapes = reader.get_variable_to_shape_map()
        assert set(shapes) == set(source.tensors)
        for key, shape in shapes.items():
            assert tuple(shape) == source.tensors[key].shape
            # Its checksum is looked at when TensorFlow reads it.
            assert np.asarray(reader.get_tensor(key)).tobytes() == bytes(source.read(key)), key


def test_a_saver_of_names_restores_what_was_converted(tmp_path: Path) -> None:
    convert(open_checkpoint(GOLDEN / "names/model.ckpt-5"), tmp_path / "model.index")
    bias = tf.Variable([9.0, 9.0, 9.0])
    saver = tf.compat.v1.train.Saver({"bias": bias})
    saver.restore(None, str(tmp_path / "model"))
    assert bias.numpy().tobytes() == bytes(open_checkpoint(GOLDEN / "names").read("bias"))


def test_what_tensorflow_writes_now_is_read_with_its_pieces_strings_and_tables(tmp_path: Path) -> None:
    module = tf.Module()
    module.none = tf.Variable(tf.constant([], tf.string), shape=[None], name="none")
    module.long = tf.Variable(tf.constant(["x" * 300, ""]), name="long")
    module.table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
    module.table.insert(tf.constant(["one", "two"]), tf.constant([1, 2], tf.int64))
    module.generator = tf.random.Generator.from_seed(3)
    path = tf.train.Checkpoint(net=module).write(str(tmp_path / "now"))
    reader = open_checkpoint(Path(path))
    assert [*reader.problems, *reader.verify()] == []
    assert reader.values["net"]["none"] == []
    assert bytes(reader.read("net/generator/state_var")) == module.generator.state.numpy().tobytes()
    values = tf.train.load_checkpoint(path).get_tensor("net/table/.ATTRIBUTES/table-values")
    assert bytes(reader.read("net/table/table-values")) == values.tobytes()
    assert sorted(reader.values["net"]["table"]["table-keys"]) == ["one", "two"]
