"""The dtypes of NumPy and of ml_dtypes, which TensorFlow and Keras bring, by the names of safetensors."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from unbroken.frameworks import numpy as of_numpy

NAMES = {
    **of_numpy.NAMES,
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}
_KNOWN = {name: known for known, name in NAMES.items()}


def known_name(name: str) -> str:
    """Return what NumPy or ml_dtypes calls the dtype that the safetensors format calls `name`."""
    return _KNOWN.get(name, name)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype that the safetensors format calls `name`."""
    known = _KNOWN[name]
    return np.dtype(getattr(ml_dtypes, known, known))
