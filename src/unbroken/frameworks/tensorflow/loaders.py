"""What of TensorFlow `run.batches` takes, and what it does not."""

from __future__ import annotations

import tensorflow as tf

from unbroken.errors import UnsupportedStateError
from unbroken.frameworks.tensorflow.dataset_iterators import ResumableIterator
from unbroken.frameworks.tensorflow.datasets import ResumableDataset

_HINT = (
    "pass the dataset that it was made of to run.batches, and hand out each batch in the loop, by "
    "strategy.experimental_distribute_values_from_function, to strategy.run"
)


def resumable_loader(loader: object) -> ResumableDataset | ResumableIterator | None:
    """Return `loader` made resumable, or None if it is nothing of tf.data."""
    if isinstance(loader, tf.distribute.DistributedDataset | tf.distribute.DistributedIterator):
        raise UnsupportedStateError(
            f"batches: a {type(loader).__name__} of tf.distribute has no state that could be kept", hint=_HINT
        )
    if isinstance(loader, tf.data.Dataset):
        return ResumableDataset(loader)
    if isinstance(loader, tf.data.Iterator | tf.data.NumpyIterator):
        return ResumableIterator(loader)
    return None
