"""Which TensorFlow checkpoint is meant by a path: a prefix, one of its files, or a directory of several."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from unbroken.errors import CheckpointError, StorageError, UsageError
from unbroken.interchange.files import RegularFile
from unbroken.interchange.marks import INDEX, POINTER, is_table, prefix_of
from unbroken.interchange.table import Table
from unbroken.interchange.tf_bundle import TfBundle, index_of
from unbroken.storage.failures import translated

SAVED_MODEL = "saved_model.pb"
VARIABLES = "variables"
_TEMPORARY = re.compile(r".+_temp(?:-[0-9a-f]+)?|.+\.tempstate[0-9]+", re.DOTALL)
_LARGEST_POINTER_BYTES = 1 << 24
_NAMED = re.compile(
    rb'^\s*(model_checkpoint_path|all_model_checkpoint_paths)\s*:\s*"((?:[^"\\]|\\.)*)"', re.M
)
_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|(.))", re.DOTALL)
_LETTERS = {b"n": b"\n", b"t": b"\t", b"r": b"\r"}
# Its first field is a message, that of a bundle a number.
_MESSAGE_FIRST = b"\x0a"
_NUMBER = re.compile(r"-([0-9]{1,18})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A checkpoint by its prefix, and how it was chosen where that is worth saying.

    `lies` is what is wrong with the pointer of its directory: TensorFlow would find another or none.
    """

    prefix: Path
    notes: tuple[str, ...] = ()
    lies: tuple[str, ...] = ()


def find_bundle(path: Path) -> Place | None:
    """Return the checkpoint that `path` means, None if it means none of TensorFlow's.

    A directory means what its pointer `checkpoint` names if that is whole, and otherwise the newest that
    is: by number, then by time. Of a SavedModel it is that of its variables.
    """
    if os.path.isdir(path):
        return _in_directory(path)
    if not os.path.exists(path):
        return Place(prefix=path) if path.name and _is_index(index_of(path)) else None
    if path.name.endswith(INDEX) and path.name != INDEX and _is_index(path):
        return Place(prefix=path.with_name(path.name.removesuffix(INDEX)))
    named = prefix_of(path.name)
    if named is not None:
        return Place(prefix=path.with_name(named))
    return _in_directory(path.parent) if path.name == POINTER and _pointed(path) else None


def open_bundle(path: Path) -> tuple[TfBundle, Place]:
    """Open the checkpoint that `path` means. Raises UsageError if it means none, DamagedError."""
    place = find_bundle(path)
    if place is None:
        raise UsageError(
            f"{path}: expected a checkpoint of TensorFlow, found none",
            hint="give its prefix (DIRECTORY/ckpt-5), its .index file, or its directory",
        )
    return TfBundle(place.prefix), place


def _in_directory(directory: Path) -> Place | None:
    if os.path.isfile(directory / SAVED_MODEL) and _is_index(index_of(directory / VARIABLES / VARIABLES)):
        return Place(prefix=directory / VARIABLES / VARIABLES)
    with translated("list", str(directory)):
        names = sorted(os.listdir(directory))
    pointed = _pointed(directory / POINTER)
    found = [directory / name.removesuffix(INDEX) for name in names if name.endswith(INDEX) and name != INDEX]
    found = [prefix for prefix in found if _is_index(index_of(prefix))]
    if not found:
        return None
    left = [f"{name}: left by a save that did not end" for name in _left_over(names)]
    place = _chosen(directory, found, pointed)
    return replace(place, notes=(*place.notes, *left))


def _left_over(names: list[str]) -> list[str]:
    """Return what is not of a checkpoint that was finished: the index is written last."""
    return [
        name
        for name in names
        if _TEMPORARY.fullmatch(name) or ((prefix := prefix_of(name)) and prefix + INDEX not in names)
    ]


def _chosen(directory: Path, found: list[Path], pointed: list[str]) -> Place:
    """Return the checkpoint of a directory that is meant, with what is said of the choice."""
    lies = []
    if pointed:
        prefix = directory / pointed[0].rpartition("/")[2]
        if not _is_here(directory, pointed[0]):
            lies.append(f"names {pointed[0]}, which is not in this directory")
        problem = _problem(prefix) if prefix in found else "there is none of that name"
        if problem is None:
            return Place(prefix=prefix, notes=_of_pointer(lies), lies=tuple(lies))
        lies.append(f"names {pointed[0]}, but {problem}")
    elif os.path.lexists(directory / POINTER):
        lies.append("names no checkpoint")
    prefix, passed_over = _newest(found)
    # One that was written without a manager has no pointer.
    told = f"{prefix.name}: the newest that is whole" if lies or passed_over or len(found) > 1 else None
    notes = (*_of_pointer(lies), *passed_over, *([told] if told else []))
    return Place(prefix=prefix, notes=notes, lies=tuple(lies))


def _of_pointer(lies: list[str]) -> tuple[str, ...]:
    return tuple(f"{POINTER}: {lie}" for lie in lies)


def _newest(found: list[Path]) -> tuple[Path, list[str]]:
    """Return the newest that is whole, or else the newest, and why others were passed over."""
    passed_over: list[str] = []
    newest = sorted(found, key=_age, reverse=True)
    for prefix in newest:
        problem = _problem(prefix)
        if problem is None:
            return prefix, passed_over
        passed_over.append(f"{prefix.name}: passed over, {problem}")
    return newest[0], [*passed_over, "none is whole"]


def _age(prefix: Path) -> tuple[int, float]:
    number = _NUMBER.search(prefix.name)
    with translated("read", str(prefix)):
        return (int(number[1]) if number else -1, os.stat(index_of(prefix)).st_mtime)


def _problem(prefix: Path) -> str | None:
    """Return why a checkpoint is not whole, as far as its index and the sizes of its files tell."""
    try:
        bundle = TfBundle(prefix)
    except (CheckpointError, StorageError) as error:
        return error.message
    first = bundle.problems[0] if bundle.problems else None
    return f"{first.file}: {first.problem}" if first else None


def _is_here(directory: Path, name: str) -> bool:
    """Tell whether a name in a pointer means what is directly in `directory`."""
    path = Path(os.path.normpath(directory / name))
    return path.parent == Path(os.path.normpath(directory)) or path.parent == directory.resolve()


def _pointed(pointer: Path) -> list[str]:
    """Return what a pointer names, the current checkpoint first; nothing if it is none or cannot be read."""
    if not os.path.isfile(pointer) or os.path.getsize(pointer) > _LARGEST_POINTER_BYTES:
        return []
    file = RegularFile(pointer)
    named = _NAMED.findall(bytes(file.read(0, file.size_bytes)))
    current = [value for field, value in named if field == b"model_checkpoint_path"]
    others = [value for field, value in named if field != b"model_checkpoint_path"]
    return [*dict.fromkeys(_unescaped(value) for value in (*current[-1:], *others))] if current else []


def _unescaped(value: bytes) -> str:
    def meant(match: re.Match[bytes]) -> bytes:
        if match[3]:
            return _LETTERS.get(match[3], match[3])
        return bytes([(int(match[1], 8) if match[1] else int(match[2], 16)) & 0xFF])

    return _ESCAPE.sub(meant, value).decode("utf-8", "backslashreplace")


def _is_index(path: Path) -> bool:
    """Tell whether a file is the index of a bundle: by what is in it, or else by the data files beside it."""
    if not os.path.isfile(path):
        return False
    try:
        return is_index_file(RegularFile(path)) or _has_data(path)
    except StorageError:
        return True


def _has_data(index: Path) -> bool:
    prefix = index.name.removesuffix(INDEX)
    with translated("list", str(index.parent)):
        return any(prefix_of(name) == prefix for name in os.listdir(index.parent))


def is_index_file(file: RegularFile) -> bool:
    """Tell whether a file is a table that begins as an index does; a damaged beginning counts, too."""
    if not is_table(file):
        return False
    try:
        key, value = next(Table(file).entries(), (b"?", memoryview(b"")))
    except CheckpointError:
        return True
    return key == b"" and not is_older(value)


def is_older(value: memoryview) -> bool:
    """Tell whether the first value of a table is that of the single-file format before bundles."""
    return bytes(value[:1]) == _MESSAGE_FIRST
