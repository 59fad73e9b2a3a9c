"""What tells one data set from another without asking it for a sample.

Reading samples here could open files that must be opened in workers, draw random numbers, or fill caches.
So the code of the data set is left alone: what is looked at are the tensors, arrays and lists of names that
it holds with one row for each sample. Of each the shape and a digest of its first, middle and last row are
taken. A data set that knows better says so in an attribute `unbroken_fingerprint`: a plain value that is
compared instead, or False for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch.utils.data import Subset

_PLAIN = (str, bytes, int, float, bool, type(None))
_MOST_BYTES = 4096
_DEEPEST = 3
_MOST_HELD = 32


def data_fingerprint(dataset: Any) -> dict[str, object]:
    """Return texts by the place they stand for, such as `dataset.tensors[0]`."""
    return dict(_look("dataset", dataset, 0))


def _look(path: str, dataset: Any, depth: int) -> Iterator[tuple[str, object]]:
    own = getattr(dataset, "unbroken_fingerprint", None)
    if own is not None:
        if own is not False:
            yield path, own if isinstance(own, _PLAIN) else repr(own)
        return
    yield path, type(dataset).__qualname__
    length = len(dataset) if isinstance(dataset, Sized) else None
    yield f"{path}_length", length
    if not length:
        return
    if isinstance(dataset, (list, tuple, range, np.ndarray, torch.Tensor)):
        yield f"{path} rows", _rows(dataset)
        return
    for name, held in list(_held(dataset))[:_MOST_HELD]:
        if _has_rows(held, length) or (isinstance(dataset, Subset) and held is dataset.indices):
            yield f"{path}{name}", _rows(held)
    if depth < _DEEPEST:
        for name, inner in _wrapped(dataset):
            yield from _look(f"{path}{name}", inner, depth + 1)


def _held(dataset: Any) -> Iterator[tuple[str, Any]]:
    attributes: Mapping[str, Any] = getattr(dataset, "__dict__", {})
    for name, value in attributes.items():
        yield f".{name}", value
        if type(value) is tuple and len(value) <= _MOST_HELD:
            for place, item in enumerate(value):
                yield f".{name}[{place}]", item


def _wrapped(dataset: Any) -> Iterator[tuple[str, Any]]:
    attributes: Mapping[str, Any] = getattr(dataset, "__dict__", {})
    if "dataset" in attributes:
        yield ".dataset", attributes["dataset"]
    several = attributes.get("datasets")
    if isinstance(several, (list, tuple)) and len(several) <= _MOST_HELD:
        yield from ((f".datasets[{place}]", item) for place, item in enumerate(several))


def _has_rows(value: Any, length: int) -> bool:
    """Tell whether `value` stands for the samples: an array with a row for each, or a list of names.

    Other lists may be ledgers or caches, which grow.
    """
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.ndim > 0 and len(value) == length
    if not isinstance(value, (list, tuple)) or len(value) != length:
        return False
    return all(_is_name(value[place]) for place in _places(length))


def _is_name(item: object) -> bool:
    return isinstance(item, str) or (
        isinstance(item, tuple)
        and any(isinstance(part, str) for part in item)
        and all(isinstance(part, _PLAIN) for part in item)
    )


def _rows(value: Any) -> str:
    digest = blake3()
    for place in _places(len(value)):
        digest.update(_row_bytes(value[place]) + b"\0")
    text = digest.hexdigest()[:12]
    if isinstance(value, (torch.Tensor, np.ndarray)):
        kind = str(value.dtype).removeprefix("torch.")
        return f"{kind}{list(value.shape)} {text}"
    return f"{len(value)} {text}"


def _places(length: int) -> tuple[int, ...]:
    return (0, length // 2, length - 1)


def _row_bytes(row: Any) -> bytes:
    if isinstance(row, torch.Tensor):
        if row.device.type != "cpu" or row.layout is not torch.strided:
            return b""
        # Bits rather than values: not every dtype has a counterpart in numpy.
        flat = row.detach().reshape(-1)[: _MOST_BYTES // row.element_size()].contiguous()
        return flat.view(torch.uint8).numpy().tobytes()
    if isinstance(row, (np.ndarray, np.generic)):
        return repr(row).encode() if row.dtype.hasobject else row.tobytes()[:_MOST_BYTES]
    if isinstance(row, str):
        # The same files may lie in another directory of another machine.
        return "/".join(row.replace("\\", "/").rsplit("/", 2)[-2:]).encode()[:_MOST_BYTES]
    if isinstance(row, tuple):
        return b"\0".join(map(_row_bytes, row))
    return repr(row).encode()[:_MOST_BYTES] if isinstance(row, _PLAIN) else type(row).__qualname__.encode()
