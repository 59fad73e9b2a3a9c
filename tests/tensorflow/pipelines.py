"""Pipelines of tf.data, and what a run hands out of them."""

from __future__ import annotations

import random
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import unbroken

Ledger = list[tuple[int, Any]]
Dataset = tf.data.Dataset
ELEMENT = tf.TensorSpec((), tf.int64)


def numbers(stop: int = 10, start: int = 0) -> Any:
    return Dataset.range(start, stop)


def add_one(number: Any) -> Any:
    return number + 1


def pair(first: Any, second: Any) -> Any:
    return tf.stack([first, second])


def paired(both: Any) -> Any:
    return pair(both["first"], both["second"])


def first_of(first: Any, _others: Any) -> Any:
    return first


def noisy(number: Any, seed: Any) -> Any:
    noise = tf.random.stateless_uniform((), tf.cast(tf.stack([seed, seed]), tf.int32))
    return tf.cast(number, tf.float32) + noise


def seeded_noise(number: Any) -> Any:
    return tf.cast(number, tf.float32) + tf.random.uniform((), seed=3)


def shuffled_part(number: Any) -> Any:
    return Dataset.range(number, number + 4).shuffle(4, seed=3)


def in_python(number: Any) -> Any:
    return tf.numpy_function(add_one, [number], tf.int64)


def counted() -> Iterator[int]:
    yield from range(10)


def drawn() -> Any:
    """A generator function that holds a random generator, which goes on from pass to pass."""
    generator = random.Random(5)

    def draw() -> Iterator[int]:
        for _ in range(10):
            yield generator.randrange(100)

    return Dataset.from_generator(draw, output_signature=ELEMENT).batch(2)


def from_text() -> Any:
    directory = Path(tempfile.mkdtemp())
    try:
        (directory / "numbers.txt").write_text("".join(f"{number}\n" for number in range(10)))
        lines = [*tf.data.TextLineDataset(str(directory / "numbers.txt"))]
    finally:
        (directory / "numbers.txt").unlink()
        directory.rmdir()
    return Dataset.from_tensor_slices(lines).map(tf.strings.to_number).shuffle(10, seed=1).batch(2)


PIPELINES: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: numbers().shuffle(5, seed=1).batch(2),
    "shuffled, prefetched": lambda: (
        numbers().shuffle(5, seed=1).map(add_one, num_parallel_calls=tf.data.AUTOTUNE).batch(2).prefetch(2)
    ),
    "shuffled and repeated": lambda: numbers(6).shuffle(6, seed=1).repeat(2).batch(2),
    "cached between shuffles": lambda: numbers().shuffle(10, seed=1).cache().shuffle(4, seed=2).batch(2),
    "always the same order": lambda: numbers().shuffle(10, seed=1, reshuffle_each_iteration=False).batch(3),
    "shuffled parts": lambda: (
        numbers(3).interleave(shuffled_part, cycle_length=2, num_parallel_calls=2).batch(2)
    ),
    "zipped": lambda: (
        Dataset.zip((numbers().shuffle(10, seed=1), numbers(20, 10).shuffle(4, seed=2))).map(pair).batch(2)
    ),
    "zipped by names": lambda: (
        Dataset.zip({"first": numbers().shuffle(10, seed=1), "second": numbers(20, 10)}).map(paired).batch(2)
    ),
    "zipped in a nest": lambda: (
        Dataset.zip((numbers().shuffle(10, seed=1), (numbers(20, 10), numbers()))).map(first_of).batch(2)
    ),
    "sampled": lambda: Dataset.sample_from_datasets(
        [numbers(6).shuffle(6, seed=1), numbers(14, 10)], seed=3
    ).batch(2),
    "sampled without end": lambda: (
        Dataset.sample_from_datasets(
            [numbers(6).shuffle(6, seed=1).repeat(), numbers(14, 10).repeat()], seed=3
        )
        .batch(2)
        .take(5)
    ),
    "noise without a state": lambda: (
        Dataset.zip((numbers().shuffle(10, seed=2), Dataset.random(seed=3))).map(noisy).batch(2)
    ),
    "text": from_text,
    "a generator, shuffled": lambda: (
        Dataset.from_generator(counted, output_signature=ELEMENT).shuffle(5, seed=3).batch(2)
    ),
    "a generator, repeated": lambda: (
        Dataset.from_generator(counted, output_signature=ELEMENT).shuffle(5, seed=3).batch(2).repeat(2)
    ),
    "Python in between": lambda: numbers().shuffle(10, seed=1).map(in_python).batch(2),
    "noise of a seeded operation": lambda: numbers().shuffle(10, seed=1).map(seeded_noise).batch(2),
}


def consumed(
    directory: Path,
    dataset: Any,
    *,
    epochs: int = 3,
    stop_at: int = -1,
    most: int | None = None,
    **options: Any,
) -> Ledger:
    """Train, and be asked to stop in the step of this number; return the epoch and batch of each step.

    An epoch is left after `most` batches.
    """
    ledger: Ledger = []
    try:
        with unbroken.Run(directory, background=False) as run:
            for epoch in run.epochs(epochs):
                for batch in run.batches(dataset):
                    ledger.append((epoch, np.asarray(batch).tolist()))
                    if run.step_count + 1 == stop_at:
                        signal.raise_signal(signal.SIGTERM)
                    run.step()
                    if most is not None and run.step_count % most == 0:
                        break
    except SystemExit:
        pass
    return ledger


def iterated(dataset: Any, *, epochs: int = 3, most: int | None = None) -> Ledger:
    """Return what plain loops get of a dataset."""
    return [
        (epoch, np.asarray(batch).tolist())
        for epoch in range(epochs)
        for _, batch in zip(range(most or 1_000_000), dataset, strict=False)
    ]
