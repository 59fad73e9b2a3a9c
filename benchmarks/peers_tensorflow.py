"""tf.train.Checkpoint of variables that hold as many bytes in as many tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import tensorflow as tf
from peers import IsDurable, Peer, durable
from states import StateSpec, fingerprint


class VariableState:
    """The tensors of a state as variables of TensorFlow."""

    def __init__(self, spec: StateSpec) -> None:
        random = np.random.default_rng(0)
        self.size_bytes = spec.size_bytes
        shapes = spec.tensors()
        self.tensor_count = len(shapes)
        self.variables = [tf.Variable(random.random(shape, dtype=np.float32)) for shape in shapes]
        names = list(spec.shapes)
        self._trained = [
            variable
            for index, variable in enumerate(self.variables)
            if index >= len(names) or names[index] not in spec.frozen
        ]

    def train(self) -> None:
        for variable in self._trained:
            variable.assign_add(tf.fill(variable.shape, 1e-3))

    def clear(self) -> None:
        for variable in self.variables:
            variable.assign(tf.zeros(variable.shape))

    def fingerprint(self) -> int:
        words = (variable.numpy().reshape(-1).view(np.int32) for variable in self.variables)
        return fingerprint(int(part.sum(dtype=np.int64)) for part in words)


def build(spec: StateSpec) -> VariableState:
    return VariableState(spec)


@contextmanager
def checkpoint(state: VariableState, directory: Path) -> Iterator[Peer]:
    tracked = tf.train.Checkpoint(variables=state.variables)

    def save(path: Path) -> IsDurable:
        tracked.write(str(path / "state"))
        return durable(path)

    def load(path: Path) -> None:
        tracked.read(str(path / "state")).assert_consumed()

    yield Peer(save=save, load=load)
