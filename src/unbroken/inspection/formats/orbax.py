"""The directories of Orbax: one item of arrays, or several of a step, each in a directory of its own.

The keys of arrays and all that is none stand in JSON. The arrays are in a store of their own, and what is
in that is read if `tensorstore` is installed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unbroken.checkpoint.finding import Finding
from unbroken.errors import DamagedError, StorageError, UsageError
from unbroken.inspection.detect import ORBAX_CHECKPOINT, ORBAX_MANIFEST, ORBAX_TEMPORARY, ORBAX_TREE
from unbroken.inspection.formats.base import CheckpointReader, StoredTensor, damaged, encodable
from unbroken.inspection.formats.joined import nested
from unbroken.inspection.formats.json_files import read_json
from unbroken.inspection.formats.orbax_arrays import INSTALL, Arrays, StoredArray, library
from unbroken.inspection.formats.views import scalar
from unbroken.storage.failures import translated

_STRINGS, _SHARDING, _JSON_ITEM = "_strings.json", "_sharding", "metadata"
_NAMELESS = "it is missing, and with it the names of the arrays"
_COMMITTED, _EVERY_CHUNK = "commit_timestamp_nsecs", "store_array_data_equal_to_fill_value"
_EMPTY: Mapping[str, Any] = {"None": None, "Dict": {}, "List": [], "Tuple": [], "NamedTuple": {}}
# Keys of this kind are places in a list.
_OF_A_LIST = 1


class OrbaxDirectory(CheckpointReader):
    """A directory with the items of a step, or with one item."""

    format = "Orbax"
    # Those of the index of a store are checked whenever it is read; arrays have none.
    checksums = None

    def __init__(self, directory: Path) -> None:
        self.path = directory
        self.files, self._links = _files_in(directory)
        self.size_bytes = sum(self.files.values())
        self.tensors = {}
        self.problems = []
        self.notes = []
        self._arrays: dict[str, tuple[Arrays, str, StoredArray]] = {}
        self._library = library()
        said = self._object(ORBAX_CHECKPOINT)
        self._judge(said)
        values: dict[tuple[str | int, ...], Any] = {}
        if ORBAX_TREE in self.files:
            values |= self._tree("")
        elif self._is_of_arrays("") or isinstance(said.get("item_handlers"), str):
            self._problem(ORBAX_TREE, _NAMELESS)
        for item, handler in self._items(said).items():
            values |= self._item(item, handler)
        self.values = nested(values)
        self.facts = {"metadata": _facts(said)}
        if self._library is None:
            self.needs = INSTALL
            self.notes.append(f"without tensorstore only the names of arrays are known: {INSTALL}")

    def read(self, path: str) -> memoryview:
        """Return the bytes of an array.

        Raises DamagedError if they are not all there, StorageError if they are too many, and UsageError
        if what reads them is not installed.
        """
        self._check_library()
        arrays, name, array = self._arrays[path]
        return arrays.read(name, array)

    def verify(self) -> Iterator[Finding]:
        """Read every array: its chunks are there, and can be unpacked. Raises UsageError as `read` does."""
        self._check_library()
        for path in self.tensors:
            try:
                self.read(path)
            except (DamagedError, StorageError) as error:
                yield Finding(file=self.tensors[path].where, problem=error.message)

    def _check_library(self) -> None:
        if self.needs is not None:
            raise UsageError(
                f"{self.path}: expected tensorstore, the library that reads its arrays, found none",
                hint=self.needs,
            )

    def _judge(self, said: Mapping[str, Any]) -> None:
        name = self.path.resolve().name
        if ORBAX_TEMPORARY in name:
            self._problem(name, f"a save that did not end: its name still has {ORBAX_TEMPORARY}")
        elif ORBAX_CHECKPOINT in self.files and not said.get(_COMMITTED):
            self._problem(ORBAX_CHECKPOINT, "it was begun and never committed")
        for link in self._links:
            self._problem(link, "a link, which is not followed")

    def _items(self, said: Mapping[str, Any]) -> dict[str, str]:
        """Return the items that are there, with what wrote each of them."""
        handlers = said.get("item_handlers")
        named = (
            {name: str(handler) for name, handler in handlers.items()} if isinstance(handlers, dict) else {}
        )
        found = {name.partition("/")[0] for name in self.files if "/" in name}
        for name in named.keys() - found:
            self._problem(name, "the item is missing")
        if handlers is not None or ORBAX_TREE in self.files or self._is_of_arrays(""):
            with_tree = {name for name in found if f"{name}/{ORBAX_TREE}" in self.files}
            found = with_tree | (found & named.keys())
        # Older ones do not say which items there are: each directory is one.
        return {name: named.get(name, "") for name in sorted(found)}

    def _item(self, item: str, handler: str) -> dict[tuple[str | int, ...], Any]:
        if f"{item}/{ORBAX_TREE}" in self.files:
            return self._tree(f"{item}/")
        if f"{item}/{_JSON_ITEM}" in self.files:
            return {(item,): self._json(f"{item}/{_JSON_ITEM}")}
        if self._is_of_arrays(f"{item}/"):
            self._problem(f"{item}/{ORBAX_TREE}", _NAMELESS)
        elif "Json" in handler:
            self._problem(f"{item}/{_JSON_ITEM}", "it is missing, and all of the item stands in it")
        else:
            self.notes.append(f"{item}: an item of another kind, which is not read")
        return {}

    def _is_of_arrays(self, below: str) -> bool:
        return any(f"{below}{name}" in self.files for name in (ORBAX_MANIFEST, _SHARDING))

    def _tree(self, below: str) -> dict[tuple[str | int, ...], Any]:
        """Return the values of an item by their keys, and enter its arrays."""
        said = self._object(f"{below}{ORBAX_TREE}")
        tree = said.get("tree_metadata")
        if not isinstance(tree, dict):
            self._problem(f"{below}{ORBAX_TREE}", "it does not hold the tree of a state")
            return {}
        arrays = self._opened(below, said)
        strings = self._json(f"{below}{_STRINGS}")
        prefix = (below[:-1],) if below else ()
        found: dict[tuple[str | int, ...], Any] = {}
        for entry in tree.values():
            leaf = _leaf(entry)
            if leaf is None:
                self._problem(f"{below}{ORBAX_TREE}", f"an entry that is none: {entry!r:.80}")
                continue
            keys, kind, write_shape = leaf
            name = ".".join(map(str, keys))
            if kind == "string":
                found[prefix + keys] = self._string(below, strings, name)
            elif kind in _EMPTY:
                found[prefix + keys] = _EMPTY[kind]
            else:
                found[prefix + keys] = self._array(below, arrays, prefix + keys, name, kind, write_shape)
        return found

    def _string(self, below: str, strings: Any, name: str) -> Any:
        if isinstance(strings, dict) and name in strings:
            return strings[name]
        self._problem(f"{below}{_STRINGS}", f"the text of {name} is missing")
        return None

    def _array(
        self,
        below: str,
        arrays: Arrays | None,
        keys: tuple[str | int, ...],
        name: str,
        kind: str,
        write_shape: list[int] | None,
    ) -> Any:
        untold = {"type": kind}
        if arrays is None:
            return untold
        try:
            array = arrays.array(name)
            if write_shape is not None and not _is_part_of(write_shape, array.shape):
                raise damaged(
                    name, f"a shape that {ORBAX_TREE} has pieces of {write_shape} of", f"{list(array.shape)}"
                )
            if kind == "scalar" and not array.shape:
                return scalar(bytes(arrays.read(name, array)), array.dtype, is_big_endian=False)
        except DamagedError as error:
            self._problem(f"{below}{name}", error.message.removeprefix(f"{name}: "))
            return untold
        except StorageError as error:
            self.notes.append(error.message)
            return untold
        path = "/".join(map(str, keys))
        while path in self.tensors:
            path += "'"
        where = f"{below}{name}"
        self.tensors[path] = StoredTensor(
            dtype=array.dtype, shape=array.shape, size_bytes=array.size_bytes, where=where
        )
        self._arrays[path] = arrays, name, array
        return {"$tensor": path}

    def _opened(self, below: str, said: Mapping[str, Any]) -> Arrays | None:
        has_manifest = f"{below}{ORBAX_MANIFEST}" in self.files
        is_ocdbt = said.get("use_ocdbt", has_manifest) is not False
        if is_ocdbt and not has_manifest:
            self._problem(f"{below}{ORBAX_MANIFEST}", "it is missing, and with it the place of every array")
            return None
        # A store would follow links that lie in it.
        if self._library is None or self._links:
            return None
        # Older ones leave out chunks of nothing but zeros, and so one that is lost looks like that.
        may_lack_chunks = said.get(_EVERY_CHUNK) is not True
        if may_lack_chunks:
            where = below.rstrip("/") or self.path.name
            self.notes.append(f"{where}: chunks of zeros were left out, so one that is lost is read as such")
        try:
            return Arrays(
                self._library,
                self.path / below,
                self.size_bytes,
                is_ocdbt=is_ocdbt,
                may_lack_chunks=may_lack_chunks,
            )
        except DamagedError as error:
            self._problem(below or self.path.name, error.message)
            return None

    def _object(self, name: str) -> dict[str, Any]:
        found = self._json(name)
        if isinstance(found, dict):
            return found
        if found is not None:
            self._problem(name, f"expected an object, found {type(found).__name__}")
        return {}

    def _json(self, name: str) -> Any:
        if name not in self.files:
            return None
        try:
            return read_json(self.path / name)
        except DamagedError as error:
            self._problem(name, error.message.removeprefix(f"{Path(name).name}: "))
        return None

    def _problem(self, file: str, problem: str) -> None:
        self.problems.append(Finding(file=file, problem=problem))


def _files_in(directory: Path) -> tuple[dict[str, int], list[str]]:
    """Return the files below `directory` with their sizes, and the links among them."""
    files: dict[str, int] = {}
    links: list[str] = []
    with translated("list", str(directory)):
        for place, directories, names in os.walk(directory):
            below = Path(place).relative_to(directory)
            for name in (*directories, *names):
                path, said = Path(place, name), encodable((below / name).as_posix())
                if path.is_symlink():
                    links.append(said)
                elif path.is_file():
                    files[(below / name).as_posix()] = path.stat().st_size
    return dict(sorted(files.items())), sorted(links)


def _leaf(entry: Any) -> tuple[tuple[str | int, ...], str, list[int] | None] | None:
    """Return the keys that lead to a leaf, its kind and its shape, or None if it is no entry of one."""
    try:
        keys = tuple(
            int(key["key"]) if key["key_type"] == _OF_A_LIST else str(key["key"])
            for key in entry["key_metadata"]
        )
        said = entry["value_metadata"]
        kind, shape = str(said["value_type"]), said.get("write_shape")
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
        return None
    is_shape = isinstance(shape, list) and all(type(length) is int for length in shape)
    return (keys, kind, shape if is_shape else None) if keys else None


def _is_part_of(piece: list[int], shape: tuple[int, ...]) -> bool:
    """Tell whether an array can have been written in pieces like that: each device writes its own."""
    return len(piece) == len(shape) and all(map(int.__le__, piece, shape))


def _facts(said: Mapping[str, Any]) -> dict[str, Any]:
    handlers = said.get("item_handlers")
    custom = said.get("custom_metadata")
    return {
        **({"items": sorted(handlers)} if isinstance(handlers, dict) else {}),
        **({"custom": custom} if custom else {}),
        **({"metrics": said["metrics"]} if said.get("metrics") else {}),
    }
