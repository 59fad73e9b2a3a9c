"""How many numbers of a tensor are not finite, from its bytes alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from unbroken.storage.base import Buffer

_FLOATS: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "C64": np.dtype("<f4"),
}
# The bits of the exponent: all of them are set in NaN and infinity, and in nothing else (IEEE 754).
_EXPONENTS = {"F16": 0x7C00, "BF16": 0x7F80}
_PIECE_BYTES = 1 << 18


def count_non_finite(data: Buffer, dtype: str) -> int:
    """Return how many numbers in `data`, of a dtype of the safetensors format, are NaN or infinite.

    Integers never are, and 8 bits are not looked at; of complex numbers both halves count.
    """
    if not memoryview(data).nbytes:
        return 0
    if dtype in _EXPONENTS:
        exponent = _EXPONENTS[dtype]
        pieces = _pieces(np.frombuffer(data, np.dtype("<u2")))
        return sum(int(np.count_nonzero((piece & exponent) == exponent)) for piece in pieces)
    if dtype not in _FLOATS:
        return 0
    numbers = np.frombuffer(data, _FLOATS[dtype])
    with np.errstate(all="ignore"):
        # One that is not finite makes the sum so; an overflow does, too, and then all are counted.
        if np.isfinite(np.add.reduce(numbers)):
            return 0
    return sum(piece.size - int(np.count_nonzero(np.isfinite(piece))) for piece in _pieces(numbers))


def _pieces(numbers: np.ndarray) -> list[np.ndarray]:
    """Cut `numbers` to what stays in the cache with what is made of it."""
    count = _PIECE_BYTES // numbers.itemsize
    return [numbers[start : start + count] for start in range(0, numbers.size, count)]
