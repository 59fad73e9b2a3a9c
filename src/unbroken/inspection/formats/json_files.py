"""JSON files that stand beside tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unbroken.inspection.formats.base import RegularFile, damaged, encodable

_LARGEST_BYTES = 256 << 20


def read_json(path: Path) -> Any:
    """Return what a JSON file holds, in text that every terminal takes. Raises DamagedError."""
    file = RegularFile(path)
    if file.size_bytes > _LARGEST_BYTES:
        raise damaged(path.name, f"at most {_LARGEST_BYTES} bytes", f"{file.size_bytes}")
    try:
        return _clean(json.loads(bytes(file.read(0, file.size_bytes))))
    except (ValueError, RecursionError) as error:
        raise damaged(path.name, "JSON", str(error)) from error


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {encodable(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return encodable(value) if isinstance(value, str) else value
