"""The state of a tf.data iterator as bytes: where each stage of its pipeline stands, and what they hold."""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf

from unbroken.errors import StateMismatchError

_POLICIES = tf.data.experimental.ExternalStatePolicy
CannotBeSaved = tf.errors.OpError
_SHUFFLES = re.compile(rb"(Iterator::Root[^@]*)@@epoch_num_random_samples@")
_NUMBERS = re.compile(rb"\[\d+\]")


def state_of(iterator: Any, *, shuffles_inside: bool = False) -> bytes:
    """Return the state of `iterator`; raises CannotBeSaved if that is not all of it, or there is none.

    With `shuffles_inside` nothing in the functions of its pipeline is outside of it but shuffles, each of
    which is made anew with its seed.
    """
    # TensorFlow takes the seeds of a shuffle in a function for a state that is not in the iterator.
    return _taken(iterator, _POLICIES.IGNORE if shuffles_inside else _POLICIES.FAIL)


def start_of(iterator: Any) -> bytes | None:
    """Return the state of an iterator that has given nothing yet, None if it has none.

    What lies outside of TensorFlow is not in it: whoever goes on from here reads from the start.
    """
    try:
        return _taken(iterator, _POLICIES.IGNORE)
    except CannotBeSaved:
        return None


def shuffles_in(state: bytes) -> set[bytes]:
    """Return the shuffles whose seeds are in a state: those that this pass has not done with."""
    # Stages are known by their way from the root; a repetition is numbered.
    return {_NUMBERS.sub(b"", way) for way in _SHUFFLES.findall(state)}


def put(iterator: Any, state: bytes) -> None:
    """Put `iterator`, and the shuffles of its dataset, into `state`; raises StateMismatchError."""
    try:
        tf.raw_ops.DeserializeIterator(
            resource_handle=iterator._iterator_resource, serialized=tf.io.parse_tensor(state, tf.variant)
        )
    except CannotBeSaved as error:
        raise StateMismatchError(
            f"batches: the state of the tf.data iterator in the checkpoint does not fit: {reason(error)}",
            hint="resume with the pipeline, and the release of TensorFlow, that the run began with",
        ) from None


def reason(error: tf.errors.OpError) -> str:
    """Return what TensorFlow says, without where in its own code it says so."""
    text = str(error.message).rpartition("}} ")[2]
    return text.partition(" [Op:")[0].strip().rstrip(".")


def _taken(iterator: Any, policy: Any) -> bytes:
    state = tf.raw_ops.SerializeIterator(
        resource_handle=iterator._iterator_resource, external_state_policy=policy.value
    )
    taken: bytes = tf.io.serialize_tensor(state).numpy()
    return taken
