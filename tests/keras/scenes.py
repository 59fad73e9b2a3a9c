"""What the tests of Keras share: small models, training that is a function of the step, runs that save."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import unbroken
from unbroken.checkpoint.store import CheckpointStore


def batch(step: int, *shape: int) -> Any:
    """Return the batch of a step, the same in every attempt."""
    return np.random.default_rng(step).normal(size=shape).astype(np.float32)


def train(model: Any, optimizer: Any, steps: range, *shape: int) -> list[str]:
    """Train eagerly for the steps of these numbers and return the losses, to the last bit."""
    losses = []
    for step in steps:
        inputs = batch(step, *(shape or (6, 4)))
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_mean(tf.square(model(inputs, training=True))))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        losses.append(float(loss).hex())
    return losses


def dense(*names: str | None, seed: int = 0, units: int = 4) -> Any:
    """Return a Sequential model of one layer for each of `names`, with weights that depend on the seed."""
    layers = [
        keras.layers.Dense(
            units, name=name, kernel_initializer=keras.initializers.GlorotUniform(seed + place)
        )
        for place, name in enumerate(names)
    ]
    return keras.Sequential([keras.Input((4,)), *layers])


def save(directory: Path, **parts: Any) -> None:
    with unbroken.Run(directory, **parts) as run:
        run.step()


def restore(directory: Path, **arguments: Any) -> list[str]:
    """Restore, and return the report for people."""
    with unbroken.Run(directory, resume="must", **arguments) as run:
        assert run.restored is not None
        return run.restored.lines()


def values(*owners: Any) -> list[bytes]:
    """Return the bytes of all variables of models, optimizers or metrics, in their order."""
    return [variable.numpy().tobytes() for owner in owners for variable in owner.variables]


def state_of(directory: Path, part: str = "model") -> Any:
    return CheckpointStore(directory).latest().manifest.parts[part].state


def twins(
    directory: Path,
    build: Callable[[int], dict[str, Any]],
    advance: Callable[..., Iterable[Any]],
    *,
    before: int = 1,
    after: int = 2,
) -> None:
    """Assert that what `build` makes goes on after a restore as if it had never been interrupted."""
    parts, steps = build(1), range(before, before + after)
    list(advance(range(before), **parts))
    save(directory, **parts)
    expected = list(advance(steps, **parts))
    again = build(2)
    restore(directory, **again)
    assert list(advance(steps, **again)) == expected
    owners = [part for part in parts if hasattr(parts[part], "variables")]
    assert values(*(again[name] for name in owners)) == values(*(parts[name] for name in owners))
