"""The map of names in a file: a JSON object, `{"old name": "new name"}`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unbroken.errors import UsageError
from unbroken.interchange.files import RegularFile, encodable

_LARGEST_BYTES = 64 << 20
_HINT = 'write a map such as {"model/encoder": "encoder", "head.weight": "classifier.weight"}'


def read_rename(path: Path) -> dict[str, str]:
    """Return the map of names in the file `path`. Raises UsageError if it is none."""
    if not path.is_file():
        raise UsageError(f"{path}: expected a file with a map of names, found none", hint=_HINT)
    file = RegularFile(path)
    if file.size_bytes > _LARGEST_BYTES:
        raise _refused(path, f"{file.size_bytes} bytes; at most {_LARGEST_BYTES} are read")
    try:
        found = json.loads(bytes(file.read(0, file.size_bytes)), object_pairs_hook=_pairs)
    except (ValueError, RecursionError) as error:
        raise _refused(path, str(error)) from error
    if not isinstance(found, _Pairs):
        raise _refused(path, f"a {type(found).__name__}")
    rename: dict[str, str] = {}
    for old, new in found:
        if not isinstance(new, str):
            raise _refused(path, f"{old!r} becomes {new!r:.60}")
        if encodable(new) != new:
            raise _refused(path, f"{new!r}, which is no text")
        if rename.setdefault(old, new) != new:
            raise _refused(path, f"two rules for {old!r}")
    if not rename:
        raise _refused(path, "an empty one")
    return rename


class _Pairs(list[tuple[str, Any]]):
    """The items of a JSON object, in their order and with doubles."""


def _pairs(pairs: list[tuple[str, Any]]) -> _Pairs:
    return _Pairs(pairs)


def _refused(path: Path, found: str) -> UsageError:
    return UsageError(f"{path}: expected a JSON object of names, found {found}", hint=_HINT)
