"""What several files hold, as one: where their values are nested, and where the tensors in them are then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from unbroken.checkpoint.finding import Finding
from unbroken.inspection.formats.base import CheckpointReader, StoredTensor


class Parts:
    """The readers of several files, each below the name of its part. A part may lie in several files."""

    def __init__(self) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self.values: dict[str, Any] = {}
        self.attributes: dict[str, Any] = {}
        self.problems: list[Finding] = []
        self.notes: list[str] = []
        self.objects: set[str] = set()
        self.readers: dict[str, CheckpointReader] = {}
        self._sources: dict[str, tuple[CheckpointReader, str]] = {}

    def add(self, part: str, file: str, reader: CheckpointReader) -> None:
        """Take in what `reader` has of the file or directory `file`."""
        values = reader.values
        # {"optimizer": {...}} is the state of part "optimizer", and need not say so twice.
        is_named = isinstance(values, dict) and values.keys() == {part} and isinstance(values[part], dict)
        begin = "" if is_named else f"{part}/"
        moved = {path: self._free(f"{begin}{path}") for path in reader.tensors}
        for path, entry in reader.tensors.items():
            aliases = tuple(f"{begin}{alias}" for alias in entry.aliases)
            where = entry.where if entry.where == file else f"{file}: {entry.where}"
            self.tensors[moved[path]] = replace(entry, where=where, aliases=aliases)
            self._sources[moved[path]] = reader, path
        said = placed(values[part] if is_named else values, moved)
        before = self.values.get(part)
        if isinstance(before, dict) and isinstance(said, dict):
            said = before | said
        # Formats that hold nothing but tensors have nothing to say.
        if said:
            self.values[part] = said
        attributes = reader.facts.get("attributes") or {}
        self.attributes |= {f"{begin}{path}": placed(value, moved) for path, value in attributes.items()}
        self.problems += [_found_in(file, found) for found in reader.problems]
        self.notes += [f"{file}: {note}" for note in reader.notes]
        self.objects.update(reader.facts.get("objects", []))
        self.readers[file] = reader

    def read(self, path: str) -> memoryview:
        """Return the bytes of a tensor. Raises DamagedError."""
        reader, inner = self._sources[path]
        return reader.read(inner)

    def verify(self) -> Iterator[Finding]:
        """Read everything, and yield what is damaged."""
        for file, reader in self.readers.items():
            for found in reader.verify():
                yield _found_in(file, found)

    def _free(self, path: str) -> str:
        while path in self.tensors:
            path += "'"
        return path


def _found_in(file: str, found: Finding) -> Finding:
    return found if found.file == file else Finding(file=file, problem=f"{found.file}: {found.problem}")


def placed(values: Any, places: Mapping[str, str]) -> Any:
    """Return plain values whose references to tensors lead to where these are now."""
    if isinstance(values, list):
        return [placed(item, places) for item in values]
    if not isinstance(values, dict):
        return values
    found = {key: placed(item, places) for key, item in values.items()}
    path = found.get("$tensor")
    return {**found, "$tensor": places.get(path, path)} if isinstance(path, str) else found


def nested(flat: Mapping[tuple[str | int, ...], Any]) -> dict[str, Any]:
    """Return the dictionaries and lists that values by their keys are made of.

    >>> nested({("model", "w"): 1, ("groups", 0, "lr"): 2})
    {'model': {'w': 1}, 'groups': [{'lr': 2}]}
    """
    root: dict[str | int, Any] = {}
    for keys, value in flat.items():
        inner = root
        for key in keys[:-1]:
            following = inner.setdefault(key, _Inner())
            if not isinstance(following, _Inner):
                # A value may have taken the name of what others are nested in.
                following = inner[key] = _Inner({"": following})
            inner = following
        last = keys[-1]
        inner[last] = _Inner({**inner[last], "": value}) if isinstance(inner.get(last), _Inner) else value
    return {str(key): _plain(item) for key, item in root.items()}


class _Inner(dict[str | int, Any]):
    """A dictionary that came of keys, and is no value."""


def _plain(value: Any) -> Any:
    if not isinstance(value, _Inner):
        return value
    if value and all(type(key) is int for key in value) and sorted(value) == [*range(len(value))]:
        return [_plain(value[index]) for index in range(len(value))]
    return {str(key): _plain(item) for key, item in value.items()}
