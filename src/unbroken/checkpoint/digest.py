"""Digests of bytes: a fast one for shards, and one that nobody can forge for the manifest that lists them.

What is in shards is digested while training goes on beside it: XXH3 (128 bits) runs at the speed of memory,
and tells every damage that happens. It does not tell what somebody has made on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import xxhash
from blake3 import blake3

from unbroken.storage.base import Buffer


class Hasher(Protocol):
    """Takes bytes piece by piece."""

    def update(self, data: Buffer, /) -> object: ...

    def hexdigest(self) -> str: ...


ALGORITHM = "xxh3-128"
# Format 1 had the other one.
_HASHERS: Mapping[str, Callable[[], Hasher]] = {ALGORITHM: xxhash.xxh3_128, "blake3": blake3}
ALGORITHMS = tuple(_HASHERS)


def digest(data: Buffer, algorithm: str = ALGORITHM) -> str:
    """Return the digest of `data` in hexadecimal."""
    if algorithm == ALGORITHM:
        return xxhash.xxh3_128_hexdigest(data)
    found = hasher(algorithm)
    found.update(data)
    return found.hexdigest()


def hasher(algorithm: str) -> Hasher:
    """Return what makes a digest by `algorithm`, which is one of ALGORITHMS."""
    return _HASHERS[algorithm]()


def seal(data: Buffer) -> str:
    """Return the digest of a manifest, by BLAKE3 (256 bits), in hexadecimal."""
    return blake3(data).hexdigest()
