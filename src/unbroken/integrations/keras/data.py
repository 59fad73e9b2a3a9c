"""What fit was given to read, with a position; and the batches in the form that the backend takes."""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras.src import tree
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from keras.src.trainers.data_adapters.torch_data_loader_adapter import TorchDataLoaderAdapter

from unbroken.errors import StateMismatchError, UnsupportedStateError
from unbroken.frameworks.generators import is_generator
from unbroken.frameworks.keras.fit_data import Continued, FitData, NumberedBatches, OneStream
from unbroken.integrations.keras.mirrored import MirroredDelivery
from unbroken.rundir.tell import tell
from unbroken.training.replay import resumable

# Rows of the data that are looked at to tell it from other data.
_ROWS_LOOKED_AT = 16


def fit_data(adapter: Any, steps_per_epoch: int | None) -> Any:
    """Return what the run is to read for the adapter that fit made of its data.

    Raises UnsupportedStateError for data that cannot be continued exactly.
    """
    if isinstance(adapter, ArrayDataAdapter):
        return _of_arrays(adapter, steps_per_epoch)
    if isinstance(adapter, PyDatasetAdapter):
        return _of_py_dataset(adapter, steps_per_epoch)
    if isinstance(adapter, GeneratorDataAdapter):
        first, items = adapter._first_batches, iter(adapter.generator())
        looks = {"dataset": {"class": "a generator", "arrays": _kinds(first[0])}}
        return OneStream(first, itertools.islice(items, len(first), None), looks, steps_per_epoch)
    if isinstance(adapter, TFDatasetAdapter):
        return _of_loader(adapter.get_tf_dataset(), steps_per_epoch)
    if isinstance(adapter, TorchDataLoaderAdapter):
        return _of_loader(adapter.get_torch_dataloader(), steps_per_epoch)
    raise UnsupportedStateError(
        f"fit: expected arrays, a tf.data.Dataset, a PyDataset, a DataLoader or a generator, found data for "
        f"a {type(adapter).__name__}",
        hint="give fit one of those, or train in a loop over run.epochs and run.batches",
    )


def looks_of(data: Any) -> dict[str, Any]:
    """Return what tells the data that `fit_data` gave from other data, as far as they are looked at."""
    if isinstance(data, FitData):
        return data.looks
    return {"dataset": type(data).__name__, "steps_per_epoch": None}


def check_data(adapter: Any, parts: Mapping[str, object]) -> None:
    """Raise UnsupportedStateError for data with a state that the run would not keep; say how others go on."""
    if isinstance(adapter, GeneratorDataAdapter):
        tell("fit: a generator cannot go back; a resume reads again what was consumed of it")
    if not isinstance(adapter, PyDatasetAdapter):
        return
    if adapter.enqueuer is not None:
        # They read ahead, and what they draw for batches that nobody has trained on yet is in no checkpoint.
        adapter.enqueuer = None
        tell("fit: the batches of the PyDataset are made in this process; its workers are not used")
    dataset = adapter.py_dataset
    state = state_of_its_own(dataset)
    if state is not None and not any(part is dataset for part in parts.values()):
        raise UnsupportedStateError(
            f"fit: expected a PyDataset without a state of its own, found a {type(dataset).__name__} "
            f"with {state}, which is no part of the run",
            hint="make it one: Run(..., data=dataset), and give fit the same object",
        )


def state_of_its_own(dataset: Any) -> str | None:
    """Return what a PyDataset has that changes from epoch to epoch or from draw to draw, or None."""
    for name in ("on_epoch_begin", "on_epoch_end"):
        if getattr(type(dataset), name, None) is not getattr(keras.utils.PyDataset, name, None):
            return f"an {name}()"
    drawn = [
        name
        for name, value in vars(dataset).items()
        if is_generator(value) or isinstance(value, keras.random.SeedGenerator)
    ]
    return f"the random generator {drawn[0]!r}" if drawn else None


def tell_of_validation(data: Any) -> None:
    """Say that a validation begins with its data anew in each process, where it may matter."""
    is_fixed = data is None or all(
        leaf is None or keras.ops.is_tensor(leaf) or isinstance(leaf, np.ndarray)
        for leaf in tree.flatten(data)
    )
    if is_fixed or (isinstance(data, keras.utils.PyDataset) and state_of_its_own(data) is None):
        return
    tell(
        f"fit: validation data of class {type(data).__name__} have no place in a checkpoint: what they "
        "shuffle, draw or count begins anew in a resume, and so do the values that follow from it"
    )


def _of_loader(loader: Any, steps_per_epoch: int | None) -> Any:
    if steps_per_epoch is None:
        return loader
    return Continued(lambda: resumable(loader), {"dataset": type(loader).__name__}, steps_per_epoch)


def _of_arrays(adapter: Any, steps_per_epoch: int | None) -> NumberedBatches:
    _refuse_sparse(adapter._inputs)
    inputs = array_slicing.convert_to_sliceable(adapter._inputs, target_backend="numpy")
    count, size, shuffle = adapter._num_samples, adapter._batch_size, adapter._shuffle

    def read(indices: Any) -> Any:
        def one(sliceable: Any) -> Any:
            return sliceable.convert_to_numpy(sliceable[indices])

        return tree.lists_to_tuples(tree.map_structure(one, inputs, none_is_leaf=False))

    def order(rng: np.random.Generator) -> Callable[[int], Any]:
        if not shuffle:
            return lambda at: slice(at * size, min((at + 1) * size, count))
        if shuffle == "batch":
            seed = int(rng.integers(2**63))
            return lambda at: (
                at * size + np.random.default_rng((seed, at)).permutation(min(size, count - at * size))
            )
        permuted = rng.permutation(count)
        return lambda at: permuted[at * size : (at + 1) * size]

    looks = {
        "dataset": {"samples": count, "content": _content(inputs, count)},
        "batch_size": size,
        "shuffle": shuffle if shuffle == "batch" else bool(shuffle),
    }
    return NumberedBatches(
        read, order, count=adapter.num_batches, looks=looks, steps_per_epoch=steps_per_epoch
    )


def _refuse_sparse(inputs: Any) -> None:
    for sliceable in tree.flatten(inputs):
        array = getattr(sliceable, "array", sliceable)
        kind = type(array).__name__
        if "sparse" in f"{type(array).__module__} {kind}".lower() or kind == "RaggedTensor":
            raise UnsupportedStateError(
                f"fit: expected dense arrays, found one of class {kind}",
                hint="make it dense, or train in a loop over run.epochs and run.batches",
            )


def _kinds(batch: Any) -> list[str]:
    """Return the dtypes and the numbers of axes of the arrays in a batch; values may be drawn."""
    return [
        "none" if leaf is None else f"{keras.backend.standardize_dtype(leaf.dtype)}/{len(leaf.shape)}"
        for leaf in tree.flatten(batch)
    ]


def _content(inputs: Any, count: int) -> str:
    """Return a digest of shapes, dtypes and some rows: enough to tell other data, at no cost."""
    rows = np.unique(np.linspace(0, count - 1, _ROWS_LOOKED_AT, dtype=np.int64))
    found = hashlib.blake2b(digest_size=8)
    for sliceable in tree.flatten(inputs):
        if sliceable is None:
            continue
        values = np.asarray(sliceable.convert_to_numpy(sliceable[rows]))
        found.update(repr((values.dtype.str, values.shape[1:])).encode())
        found.update(repr(values.tolist()).encode() if values.dtype.hasobject else values.tobytes())
    return found.hexdigest()


def _of_py_dataset(adapter: Any, steps_per_epoch: int | None) -> NumberedBatches:
    dataset, count = adapter.py_dataset, adapter.py_dataset.num_batches
    shuffles = bool(adapter.shuffle) and count is not None

    def order(rng: np.random.Generator) -> Callable[[int], int]:
        if not shuffles:
            return lambda at: at
        permuted = rng.permutation(count)
        return lambda at: int(permuted[at])

    return NumberedBatches(
        lambda index: adapter._standardize_batch(dataset[index]),
        order,
        count=count,
        looks={"dataset": {"class": type(dataset).__qualname__, "batches": count}, "shuffle": shuffles},
        steps_per_epoch=steps_per_epoch,
    )


def delivery(epoch_iterator: Any) -> Callable[[], Callable[[Sequence[Any]], Iterator[Any]]]:
    """Return what begins an epoch, and returns what gives batches to the train function of the backend."""
    if keras.backend.backend() != "tensorflow":
        return lambda: lambda batches: iter([_over_devices(_tensors(batch)) for batch in batches])
    strategy = epoch_iterator._distribute_strategy
    if strategy is not None and strategy.num_replicas_in_sync > 1:
        return MirroredDelivery(epoch_iterator, strategy).begin
    return TensorFlowDelivery(epoch_iterator).begin


def build_metrics(model: Any, epoch_iterator: Any) -> None:
    """Make what `model` was compiled with and would make with its first batch, of what its data look like."""
    if keras.backend.backend() != "tensorflow":
        return  # fit has done that
    compiled = (model._compile_metrics, model._compile_loss)
    if all(found is None or found.built for found in compiled):
        # A model with a train_step of its own need not have a call() to be built by.
        return
    spec = epoch_iterator._distributed_dataset.element_spec
    batch = tree.map_structure(
        lambda item: (
            keras.KerasTensor(tuple(item.shape), item.dtype.name) if hasattr(item, "shape") else None
        ),
        spec,
    )
    try:
        model._symbolic_build(data_batch=batch)
    except StateMismatchError:
        raise
    except Exception as error:
        raise UnsupportedStateError(
            f"fit: expected to make the metrics and the loss of {model.name!r} before it goes on inside an "
            f"epoch, found that it cannot be called on what its data look like: {error}",
            hint="call model.evaluate on one batch before the run is entered, or keep your own metrics as "
            "attributes of the model and compile it without loss= and metrics=",
        ) from error


def _over_devices(batch: Any) -> Any:
    """Return a batch of tensors as fit lays it out over the devices of `keras.distribution`."""
    if keras.backend.backend() != "jax" or keras.distribution.distribution() is None:
        return batch
    from keras.src.backend.jax.trainer import _distribute_data

    return _distribute_data(batch)


def _tensors(batch: Any) -> Any:
    return tree.map_structure(
        lambda value: value if value is None else keras.ops.convert_to_tensor(value), batch
    )


class TensorFlowDelivery:
    """Gives batches to a train function through an iterator of tf.data.

    Its elements are as those of the iterator that fit would have used, so that the compiled function is the
    same one, with the same bits.
    """

    def __init__(self, epoch_iterator: Any) -> None:
        import tensorflow as tf

        self._tf = tf
        self._waiting = deque[Any]()
        spec = epoch_iterator._distributed_dataset.element_spec
        options = tf.data.Options()
        # What reads ahead would find nothing there.
        options.autotune.enabled = False
        options.experimental_optimization.apply_default_optimizations = False
        options.experimental_optimization.inject_prefetch = False
        self._dataset = tf.data.Dataset.from_generator(self._take, output_signature=spec).with_options(
            options
        )

    def begin(self) -> Callable[[Sequence[Any]], Iterator[Any]]:
        """Begin an epoch."""
        self._waiting.clear()
        iterator: Iterator[Any] = iter(self._dataset)

        def give(batches: Sequence[Any]) -> Iterator[Any]:
            self._waiting.extend(self._standard(batch) for batch in batches)
            return iterator

        return give

    def _take(self) -> Iterator[Any]:
        while self._waiting:
            yield self._waiting.popleft()

    def _standard(self, batch: Any) -> Any:
        def one(value: Any) -> Any:
            if value is None:
                return self._tf.experimental.Optional.empty(None)
            if type(value).__module__.partition(".")[0] == "torch":
                return value.detach().cpu().numpy()
            return value

        return tree.lists_to_tuples(tree.map_structure(one, batch))
