"""Variables and tensors as bytes: every dtype, without a copy, as they were when they were looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from unbroken.errors import UnsupportedStateError
from unbroken.frameworks.dtypes import numpy_dtype
from unbroken.frameworks.tensorflow.tensors import TensorFlowCodec, TfTensor
from unbroken.state.table import TensorTable
from unbroken.state.tensors import HostTensor, bytes_of, copy_bytes
from unbroken.state.tree import Decoder, Encoder
from unbroken.training import families

from .. import quiet_tensorflow  # noqa: F401

import tensorflow as tf  # isort: skip

KEPT = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "C64": "complex64",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}


def round_trip(value: Any, *, describes: bool = False) -> Any:
    table = TensorTable()
    encoded = Encoder(table, families.codecs()).encode(value, "it")
    kept = {
        path: HostTensor(source.dtype, source.shape, memoryview(copy_bytes(source)))
        for path, source in table.sources.items()
    }
    return Decoder(lambda path: kept[path], families.codecs(describes=describes)).decode(encoded)


@pytest.mark.parametrize("name", KEPT)
def test_a_variable_of_every_dtype_comes_back_bit_for_bit(name: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(KEPT[name])
    variable = tf.Variable(array)
    source = TfTensor(variable)
    assert (source.dtype, source.shape) == (name, (2, 3))
    assert bytes(bytes_of(source)) == bytes(copy_bytes(source)) == array.tobytes()
    loaded = round_trip(variable)
    assert isinstance(loaded, np.ndarray)
    assert (loaded.dtype, loaded.shape, loaded.tobytes()) == (array.dtype, (2, 3), array.tobytes())
    variable.assign(np.zeros_like(array))
    assert TensorFlowCodec().assign(variable, loaded)
    assert variable.numpy().tobytes() == array.tobytes()


def test_what_has_one_element_or_none_is_kept_as_well() -> None:
    for array in (np.float32(2.5), np.zeros((0, 3), "f4"), np.zeros((2, 0), "i8")):
        loaded = round_trip(tf.Variable(array))
        assert (loaded.shape, loaded.tobytes()) == (array.shape, array.tobytes())
    assert TfTensor(tf.Variable([1.0, 2.0], shape=[None])).shape == (2,)


def test_a_tensor_comes_back_as_a_tensor_with_dtypes_and_shapes_beside_it() -> None:
    kept = {"loss": tf.constant(0.5, tf.bfloat16), "dtype": tf.float16, "shape": tf.TensorShape([None, 3])}
    loaded = round_trip(kept)
    assert tf.is_tensor(loaded["loss"])
    assert loaded["loss"].dtype == tf.bfloat16
    assert float(loaded["loss"]) == 0.5
    assert loaded["dtype"] is tf.float16
    assert loaded["shape"].as_list() == [None, 3]
    assert round_trip(tf.TensorShape(None)).rank is None


def test_what_describes_has_a_shape_and_a_dtype_and_takes_no_memory() -> None:
    described = round_trip(tf.Variable(tf.zeros((100, 1000), tf.bfloat16)), describes=True)
    assert (described.shape, described.dtype) == ((100, 1000), numpy_dtype("BF16"))
    assert described.strides == (0, 0)


@tf.function
def _in_a_function(variable: tf.Variable) -> None:
    variable.assign_add(tf.ones_like(variable))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "assign": lambda variable: variable.assign(variable * 2),
    "assign_add": lambda variable: variable.assign_add(tf.ones_like(variable)),
    "scatter": lambda variable: variable.scatter_nd_update([[0]], [100.0]),
    "slice": lambda variable: variable[1].assign(-5.0),
    "function": _in_a_function,
    "kernel": lambda variable: tf.raw_ops.ResourceApplyGradientDescent(
        var=variable.handle, alpha=1.0, delta=tf.ones_like(variable)
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_value_that_was_looked_at_stays_whatever_changes_the_variable(change: str) -> None:
    variable = tf.Variable([1.0, 2.0, 3.0])
    source = TfTensor(variable)
    before = bytes_of(source)
    CHANGES[change](variable)
    assert variable.numpy().tolist() != [1.0, 2.0, 3.0]
    assert np.frombuffer(before, "f4").tolist() == [1.0, 2.0, 3.0]
    assert np.frombuffer(bytes_of(TfTensor(variable)), "f4").tolist() == variable.numpy().tolist()


def test_two_variables_are_two_even_while_they_share_memory() -> None:
    value = tf.random.stateless_uniform((1000,), (1, 2))
    one, other = tf.Variable(tf.zeros(1000)), tf.Variable(tf.zeros(1000))
    one.assign(value)
    other.assign(value)
    table = TensorTable()
    kept = {"one": one, "other": other, "again": one}
    Encoder(table, families.codecs(), keep_aliases=True).encode(kept, "m")
    assert table.aliases == {"m/one": ["m/again"]}
    assert [*table.sources] == ["m/one", "m/other"]


def _of_a_graph() -> Any:
    with tf.Graph().as_default():
        return tf.compat.v1.get_variable("bias", shape=(2,))


REFUSED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "text": (lambda: tf.constant(["a"]), "dtype string", "Python string"),
    "complex128": (lambda: tf.Variable(1j, dtype=tf.complex128), "dtype complex128", "tf.math.real"),
    "quantized": (lambda: tf.quantization.quantize([1.0], 0.0, 1.0, tf.qint8)[0], "dtype qint8", "tf.cast"),
    "int4": (lambda: tf.cast(tf.constant([1]), tf.as_dtype("int4")), "dtype int4", "tf.cast"),
    "ragged": (lambda: tf.ragged.constant([[1], [2, 3]]), "RaggedTensor", "flat_values"),
    "sparse": (lambda: tf.sparse.from_dense([[1]]), "SparseTensor", "indices"),
    "graph": (_of_a_graph, "bias:0, whose value is in a session", "tf.compat.v1.Session itself"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_kept_is_refused_by_name_with_what_to_do(kind: str) -> None:
    make, message, hint = REFUSED[kind]
    with pytest.raises(UnsupportedStateError, match=message) as caught:
        Encoder(TensorTable(), families.codecs()).encode(make(), "model/it")
    assert "model/it" in caught.value.message
    assert hint in str(caught.value.hint)


def test_what_training_makes_is_known() -> None:
    assert TfTensor(tf.Variable(1.0)).is_trained
    assert not TfTensor(tf.Variable(1.0, trainable=False)).is_trained
    assert not TfTensor(tf.constant(1.0)).is_trained
