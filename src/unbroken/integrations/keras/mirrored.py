"""Batches of a fit on several devices of one process: each replica gets the share that fit would give it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from keras.src import tree
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter

from unbroken.errors import UnsupportedStateError


class MirroredDelivery:
    """Gives batches to a train function that runs on all replicas of `strategy`.

    No iterator of TensorFlow's is between: those that distribute read ahead in threads of their own, and the
    end of what was handed out so far would be their end. The shares have the types that the elements of the
    iterator of fit have, so that neither the batch that a process begins with nor a smaller last one decides
    how the step is compiled.
    """

    def __init__(self, epoch_iterator: Any, strategy: Any) -> None:
        import tensorflow as tf

        adapter = epoch_iterator.data_adapter
        if not isinstance(strategy, tf.distribute.MirroredStrategy):
            raise UnsupportedStateError(
                f"fit: expected a model on one device or by a MirroredStrategy, found one on "
                f"{strategy.num_replicas_in_sync} by {type(strategy).__name__}",
                hint="train it in a loop over run.epochs and run.batches",
            )
        if isinstance(adapter, GeneratorDataAdapter):
            # To build the model fit has read batches of it that nobody trains on, more or less of them.
            raise UnsupportedStateError(
                f"fit: expected data that can be read again, found a generator for a model on "
                f"{strategy.num_replicas_in_sync} devices",
                hint="give fit a keras.utils.PyDataset or a tf.data.Dataset; or train on one device",
            )
        self._tf = tf
        self._strategy = strategy
        self._devices = strategy.extended.worker_devices
        self._spec = epoch_iterator._distributed_dataset.element_spec

    def begin(self) -> Callable[[Sequence[Any]], Iterator[Any]]:
        """Begin an epoch."""
        return lambda batches: iter([self._shared_out(batch) for batch in batches])

    def _shared_out(self, batch: Any) -> Any:
        batch = tree.lists_to_tuples(batch)
        rows = next(int(leaf.shape[0]) for leaf in tree.flatten(batch) if leaf is not None)
        cuts = shares(rows, len(self._devices))
        return tree.map_structure(lambda value, spec: self._leaf(value, spec, cuts), batch, self._spec)

    def _leaf(self, value: Any, spec: Any, cuts: Sequence[slice]) -> Any:
        if value is None:
            return None
        if isinstance(value, self._tf.SparseTensor | self._tf.RaggedTensor):
            raise UnsupportedStateError(
                f"fit: expected dense batches for a model on several devices, found a {type(value).__name__}",
                hint="make them dense, or train in a loop over run.epochs and run.batches",
            )
        if not self._tf.is_tensor(value):
            value = np.asarray(_plain(value), spec._value_specs[0].dtype.as_numpy_dtype)
        pieces = []
        for device, cut in zip(self._devices, cuts, strict=True):
            with self._tf.device(device):
                pieces.append(self._tf.identity(value[cut]))
        return self._of_replicas(pieces, spec)

    def _of_replicas(self, pieces: Sequence[Any], spec: Any) -> Any:
        found = self._strategy.experimental_distribute_values_from_function(
            lambda context: pieces[context.replica_id_in_sync_group]
        )
        of_replicas: Any = type(found)
        return _typed(of_replicas)(found.values, spec)


@functools.cache
def _typed(of_replicas: Any) -> Any:
    """Return the class of values of replicas with a given type, where TensorFlow takes that of the values."""

    class Typed(of_replicas):  # type: ignore[misc]  # TensorFlow has no types
        def __init__(self, values: Sequence[Any], spec: Any) -> None:
            super().__init__(values)
            self._spec = spec

        @property
        def _type_spec(self) -> Any:
            return self._spec

    return Typed


def shares(rows: int, replicas: int) -> list[slice]:
    """Return which of the `rows` of a batch each replica gets, as TensorFlow distributes them.

    Of a smaller last batch the last shares may be smaller, or empty.
    """
    size = -(-rows // replicas)
    return [slice(at * size, min((at + 1) * size, rows)) for at in range(replicas)]


def _plain(value: Any) -> Any:
    is_torch = type(value).__module__.partition(".")[0] == "torch"
    return value.detach().cpu().numpy() if is_torch else value
