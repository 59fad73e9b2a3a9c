"""The randomness of Keras that a whole process shares, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# No public name leads to the global seed generator without making one.
from keras.src.backend.common import global_state
from keras.src.random import seed_generator
from keras.src.utils.rng_utils import GLOBAL_RANDOM_SEED

_SEED, _GENERATOR = "seed", "seed_generator"


def capture() -> dict[str, object]:
    """Return the seed that `keras.utils.set_random_seed` set, and the state of the seed generator, if any."""
    found: dict[str, object] = {}
    seed = global_state.get_global_attribute(GLOBAL_RANDOM_SEED)
    if seed is not None:
        found[_SEED] = int(seed)
    generator = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    if generator is not None:
        found[_GENERATOR] = [int(word) for word in generator.state.numpy()]
    return found


def restore(state: Mapping[str, Any]) -> None:
    """Put the process into a state that `capture` returned, here or elsewhere."""
    global_state.set_global_attribute(GLOBAL_RANDOM_SEED, state.get(_SEED))
    if _GENERATOR in state:
        seed_generator.global_seed_generator().state.assign(state[_GENERATOR])
    else:
        # Made anew from the seed, when it is asked for.
        global_state.set_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR, None)
