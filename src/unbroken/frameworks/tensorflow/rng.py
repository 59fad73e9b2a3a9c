"""The randomness of TensorFlow that a whole process shares, as plain values.

Outside of functions each operation draws a seed for itself from a generator of the process, which
`tf.random.set_seed` makes. Beside that there is the global `tf.random.Generator`, once it is asked for.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

# No public name leads to the context, nor to the global generator without making one.
from tensorflow.python.eager import context
from tensorflow.python.ops import stateful_random_ops

from unbroken.frameworks.rng import plain_python_state, python_state
from unbroken.frameworks.tensorflow.distributed import assign_value
from unbroken.frameworks.tensorflow.tensors import read_value

_SEED, _DRAWN, _GLOBAL = "seed", "operation_seeds", "global_generator"


def capture() -> dict[str, object]:
    """Return the states of what the process has: no generator is made, and no device is woken up."""
    eager = context.context()
    found: dict[str, object] = {}
    drawn = getattr(eager, "_rng", None)
    # Without a seed of the program, operations are seeded by chance, in every process otherwise.
    if isinstance(drawn, random.Random):
        seed: Any = eager._seed
        found[_SEED] = seed if seed is None or isinstance(seed, str) else int(seed)
        found[_DRAWN] = plain_python_state(drawn.getstate())
    generator = stateful_random_ops.global_generator
    if generator is not None:
        found[_GLOBAL] = generator_state(generator)
    return found


def restore(state: Mapping[str, Any]) -> None:
    """Put the process into a state that `capture` returned, here or elsewhere."""
    if _SEED in state:
        # This also forgets the operations that were seeded before, each of which has a state of its own.
        tf.random.set_seed(state[_SEED])
        context.context()._rng.setstate(python_state(state[_DRAWN]))
    if _GLOBAL in state:
        live, saved = stateful_random_ops.global_generator, state[_GLOBAL]
        if live is None or live.algorithm != saved["algorithm"]:
            made = tf.random.Generator.from_state(tf.constant(_words(saved)), saved["algorithm"])
            tf.random.set_global_generator(made)
        else:
            set_generator_state(live, saved)


def generator_state(generator: Any) -> dict[str, Any]:
    """Return the state of a `tf.random.Generator` as plain values."""
    words = [int(word) for word in read_value(generator.state).numpy()]
    return {"algorithm": int(generator.algorithm), "words": words}


def set_generator_state(generator: Any, state: Mapping[str, Any]) -> None:
    """Put a `tf.random.Generator` into a state that `generator_state` returned for one of its algorithm."""
    assign_value(generator.state, tf.constant(_words(state), dtype=generator.state.dtype))


def _words(state: Mapping[str, Any]) -> Any:
    return [int(word) for word in state["words"]]
