"""The generators that keyed samples are read under: seeded by a key, and put back."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from unbroken.frameworks.generators import HeldGenerators
from unbroken.frameworks.rng import capture_global_rng, restore_present_rng


@contextmanager
def put_back(held: HeldGenerators) -> Iterator[None]:
    """Leave the generators of this process as they were found."""
    shared, own = capture_global_rng(), held.capture()
    try:
        yield
    finally:
        restore_present_rng(shared)
        held.restore(own)


def seed_all(key: bytes, held: list[object]) -> None:
    """Seed the generators of the process, and those that are `held`, each by a key made of `key`."""
    random.seed(key)
    # By one word: by several it takes eight times as long. Torch keeps one word only, too, on the CPU.
    # That two samples in a hundred thousand share a stream is no harm.
    np.random.seed(int.from_bytes(key[8:12], "little"))
    number = int.from_bytes(key[:8], "little") >> 1
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(number)
    for place, generator in enumerate(held):
        _seed_one(generator, hashlib.blake2b(key + place.to_bytes(4, "little"), digest_size=32).digest())


def _seed_one(generator: Any, key: bytes) -> None:
    """Seed a generator that the dataset holds; each gets a stream of its own."""
    words = np.frombuffer(key, dtype=np.uint32)
    if isinstance(generator, random.Random):
        generator.seed(key)
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(int.from_bytes(key[:8], "little") >> 1)
    elif isinstance(generator, np.random.RandomState):
        generator.seed(words)
    else:
        bits = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
        bits.state = type(bits)(words).state
