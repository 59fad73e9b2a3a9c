"""Sessions of graph mode, in which TensorFlow itself compares nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unbroken.errors import StateMismatchError, UnsupportedStateError

from .. import quiet_tensorflow  # noqa: F401
from .keeping import manifest, restore, save

import tensorflow as tf  # isort: skip

v1 = tf.compat.v1


def session_with(value: float, *, rows: int = 2, is_initialized: bool = True, **more: Any) -> Any:
    graph = tf.Graph()
    with graph.as_default():
        start = v1.constant_initializer(value)
        with v1.variable_scope("dense"):
            v1.get_variable("kernel", (rows, 3), initializer=start)
            v1.get_variable("bias", (3,), initializer=start, use_resource=False)
        v1.get_variable("half", (2,), tf.bfloat16, initializer=start, trainable=False)
        v1.get_variable("seen", (), tf.int64, initializer=v1.constant_initializer(7), **more)
        session = v1.Session(graph=graph)
        if is_initialized:
            session.run((v1.global_variables_initializer(), v1.local_variables_initializer()))
        # Nothing may be added to the graph from here on.
        graph.finalize()
    return session


def values(session: Any) -> dict[str, list[float]]:
    with session.graph.as_default():
        variables = {item.op.name: item for item in (*v1.global_variables(), *v1.local_variables())}
    return {name: array.astype("f8").ravel().tolist() for name, array in session.run(variables).items()}


def test_all_variables_of_a_session_come_back(tmp_path: Path) -> None:
    local = {"collections": [v1.GraphKeys.LOCAL_VARIABLES]}
    saved, live = session_with(5.0, **local), session_with(0.0, **local)
    save(tmp_path, session=saved)
    assert manifest(tmp_path).parts["session"].state.keys() == {"dense/kernel", "dense/bias", "half", "seen"}
    restore(tmp_path, session=live)
    assert values(live) == values(saved)


def test_another_shape_is_refused_where_tensorflow_takes_it_without_a_word(tmp_path: Path) -> None:
    save(tmp_path, session=session_with(5.0))
    live = session_with(0.0, rows=3)
    before = values(live)
    with pytest.raises(StateMismatchError) as caught:
        restore(tmp_path, session=live)
    assert "session: dense/kernel: shape (3, 3), the checkpoint has shape (2, 3)" in str(caught.value)
    assert values(live) == before
    restore(tmp_path, session=live, allow=["session.dense/kernel"])
    assert values(live)["dense/kernel"] == before["dense/kernel"]
    assert values(live)["dense/bias"] == [5.0] * 3


def test_a_session_without_values_or_variables_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedStateError, match="variables that have no value yet") as caught:
        save(tmp_path, session=session_with(1.0, is_initialized=False))
    assert "global_variables_initializer" in str(caught.value.hint)
    with pytest.raises(UnsupportedStateError, match="no variables yet"):
        save(tmp_path, session=v1.Session(graph=tf.Graph()))


def test_a_variable_of_a_graph_by_itself_leads_to_its_session(tmp_path: Path) -> None:
    with tf.Graph().as_default():
        variable = v1.get_variable("kernel", (2,))
    with pytest.raises(UnsupportedStateError, match="kernel:0, whose value is in a session") as caught:
        save(tmp_path, kernel=variable)
    assert "tf.compat.v1.Session itself" in str(caught.value.hint)


def test_what_is_not_finite_in_a_session_marks_the_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, session=session_with(float("nan")))
    assert manifest(tmp_path).non_finite.keys() == {"session/dense%2Fkernel", "session/dense%2Fbias"}
