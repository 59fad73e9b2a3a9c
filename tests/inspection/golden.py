"""The files of other libraries, and what those libraries themselves read in them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

GOLDEN = Path(__file__).resolve().parents[1] / "golden/foreign"


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what the library itself gives, by the paths that a reader has to give it."""
    if isinstance(value, torch.Tensor | np.ndarray):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(item, f"{path}/{key}" if path else str(key))


def bytes_of(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return value.astype(value.dtype.newbyteorder("<")).tobytes()
    flat = value.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()
