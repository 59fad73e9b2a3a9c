"""TensorFlow's files as the tests have them: those that it wrote, and others that are made of them."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from unbroken.errors import UnbrokenError
from unbroken.inspection.detect import open_checkpoint
from unbroken.interchange.files import RegularFile
from unbroken.interchange.table import Table
from unbroken.interchange.table_writer import encoded_table

GOLDEN = Path(__file__).resolve().parents[1] / "golden/tensorflow"
# The prefix of each, below that directory.
PREFIXES = {"objects": "objects/ckpt-2", "slots": "slots", "names": "names/model.ckpt-5"}


@cache
def expected(name: str) -> dict[str, Any]:
    """Return what TensorFlow itself read when it wrote them: type, shape and bytes by key."""
    found: dict[str, Any] = json.loads((GOLDEN / "expected.json").read_text())[name]
    return found


def copied(name: str, directory: Path) -> Path:
    """Copy a bundle with what lies beside it and return its prefix there."""
    source = GOLDEN / PREFIXES[name]
    directory.mkdir(parents=True, exist_ok=True)
    for file in source.parent.glob(f"{source.name}.*"):
        shutil.copyfile(file, directory / file.name)
    return directory / source.name


def with_suffix(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)


def entries_of(index: Path) -> list[tuple[bytes, bytes]]:
    return [(key, bytes(value)) for key, value in Table(RegularFile(index)).entries()]


def rewrite(index: Path, entries: list[tuple[bytes, bytes]]) -> None:
    """Write an index with checksums that are right, whatever it says."""
    index.write_bytes(b"".join(encoded_table(entries)))


def field(number: int, value: int | bytes) -> bytes:
    """Return a field of a protocol buffer message."""
    if isinstance(value, int):
        return number_of(number << 3) + number_of(value)
    return number_of(number << 3 | 2) + number_of(len(value)) + value


def number_of(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def findings(path: Path) -> list[str]:
    """Return all that is found wrong, in words."""
    try:
        reader = open_checkpoint(path)
        return [f"{found.file}: {found.problem}" for found in (*reader.problems, *reader.verify())]
    except UnbrokenError as error:
        return [error.message]
