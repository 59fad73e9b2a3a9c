"""The digest of bytes: BLAKE3, 256 bits. Anyone can name bytes by it, nobody can forge them."""

from __future__ import annotations

from blake3 import blake3

from unbroken.storage.base import Buffer

ALGORITHM = "blake3"
# From this size on BLAKE3's own threads are worth their start.
_THREADED_BYTES = 4 << 20


def digest(data: Buffer) -> str:
    """Return the digest of `data` in hexadecimal."""
    if memoryview(data).nbytes < _THREADED_BYTES:
        return blake3(data).hexdigest()
    return blake3(data, max_threads=blake3.AUTO).hexdigest()
