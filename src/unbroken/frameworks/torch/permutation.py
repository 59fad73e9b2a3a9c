"""Permutations of millions of indices that are computed place by place and kept nowhere."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

_ROUNDS = 8
_CHUNK = 4096
_Words = npt.NDArray[np.uint64]


class Permutation:
    """A permutation of `range(length)` that depends on `seed` and `epoch` alone.

    It is a Feistel network over the pairs (place // b, place % b), whose halves have a and b values with
    `a * b` just above `length`; what falls outside is sent through it again. So any place costs the same,
    and there is no list to build. The arithmetic is our own: no release of a library changes the order.
    """

    def __init__(self, length: int, *, seed: int, epoch: int) -> None:
        self._length = length
        self._left = math.isqrt(max(length - 1, 0)) + 1
        self._right = -(-length // self._left)
        self._keys = [_key(seed, epoch, number) for number in range(_ROUNDS)]

    def at(self, places: _Words) -> _Words:
        """Return what stands at `places`, all of them below the length."""
        found = self._once(places)
        while (outside := found >= self._length).any():
            found[outside] = self._once(found[outside])
        return found

    def _once(self, places: _Words) -> _Words:
        left, right = places // np.uint64(self._right), places % np.uint64(self._right)
        for number, key in enumerate(self._keys):
            if number % 2:
                right = (right + _mixed(left, key)) % np.uint64(self._right)
            else:
                left = (left + _mixed(right, key)) % np.uint64(self._left)
        return left * np.uint64(self._right) + right


def indices_at(places: range, permutation: Permutation | None, length: int) -> Iterator[int]:
    """Yield what stands at `places`; those beyond the length begin from the front again.

    Without a permutation the order is that of the data.
    """
    for start in range(0, len(places), _CHUNK):
        part = places[start : start + _CHUNK]
        numbers = np.arange(part.start, part.stop, part.step, dtype=np.uint64) % np.uint64(length)
        yield from (numbers if permutation is None else permutation.at(numbers)).tolist()


def _key(seed: int, epoch: int, number: int) -> np.uint64:
    text = f"unbroken permutation/{seed}/{epoch}/{number}".encode()
    return np.uint64(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little"))


def _mixed(values: _Words, key: np.uint64) -> _Words:
    """Return `values` scrambled; wraps around at 64 bits, as is meant."""
    mixed = (values ^ key) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0xD6E8FEB86659FD93)
    mixed ^= mixed >> np.uint64(32)
    return mixed
