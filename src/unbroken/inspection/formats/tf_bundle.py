"""TensorFlow's checkpoints, of objects (`tf.train.Checkpoint`) and of names (`tf.compat.v1.train.Saver`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from unbroken.checkpoint.finding import Finding
from unbroken.inspection.formats.base import CheckpointReader, StoredTensor, damaged
from unbroken.inspection.formats.tf_contents import named_optimizers, optimizers, values_in
from unbroken.interchange.crc32c import is_fast
from unbroken.interchange.marks import POINTER
from unbroken.interchange.tf_bundle import TfBundle
from unbroken.interchange.tf_dtypes import is_stand_in
from unbroken.interchange.tf_entries import BundleEntry
from unbroken.interchange.tf_graph import GRAPH, ObjectGraph, graph_of, is_private, plain_path
from unbroken.interchange.tf_place import find_bundle

_ITERATOR_STATE = "ITERATOR_STATE"
_MOST_NOTES = 100
_LARGE_BYTES = 1 << 30


class TensorFlowBundle(CheckpointReader):
    """A bundle. Tensors are called by the objects that they hang on; `facts["names"]` has their own names."""

    checksums = "CRC-32C of each tensor and of the index"

    def __init__(self, path: Path) -> None:
        place = find_bundle(path)
        if place is None:
            raise damaged(str(path), "the index of a checkpoint of TensorFlow", "none that is whole")
        self.path = place.prefix
        self._lies = place.lies
        self._bundle = TfBundle(place.prefix)
        graph, problem = graph_of(self._bundle)
        self.format = "TensorFlow checkpoint, of names" if self._has_names_only() else "TensorFlow checkpoint"
        self.files = self._bundle.files
        self.size_bytes = sum(self.files.values())
        self.problems = list(self._bundle.problems)
        if problem is not None:
            self.problems.append(Finding(file=self._bundle.where(GRAPH), problem=problem))
        self.notes = [*place.notes, *self._beside()]
        self.tensors = {}
        self._keys: dict[str, str] = {}
        self._strings: dict[str, str] = {}
        self._enter(graph)
        self.values = values_in(self._bundle, self._keys, self._strings)
        self.facts = self._facts(graph)

    def read(self, path: str) -> memoryview:
        """Return the bytes of a tensor. Raises DamagedError unless its checksum holds."""
        return memoryview(self._bundle.read(self._keys[path]))

    def verify(self) -> Iterator[Finding]:
        """Read every byte against its checksum. A pointer of its directory that lies is a finding, too."""
        yield from (Finding(file=POINTER, problem=lie) for lie in self._lies)
        yield from self._bundle.verify()

    def _enter(self, graph: ObjectGraph | None) -> None:
        called = graph.paths() if graph is not None else {}
        taken: set[str] = set()
        unread: list[str] = []
        for key, entry in self._bundle.entries.items():
            # Of many variables that lie in one list, none has another path.
            paths = called.get(key) or (plain_path(key) if graph is not None else key,)
            path = _apart(paths[0], key, taken)
            taken.add(path)
            if not entry.element.is_number:
                if entry.element.name == "string" and key != GRAPH:
                    self._strings[path] = key
                if key != GRAPH:
                    unread.append(
                        f"{path}: {entry.element.name} of {entry.shape}, {entry.stored_bytes} bytes"
                    )
                continue
            self._keys[path] = key
            self.tensors[path] = self._stored(
                key, entry, [alias for alias in paths[1:] if alias not in taken]
            )
            if is_stand_in(entry.element):
                self.notes.append(f"{path}: {entry.element.name}, read as {entry.dtype}")
        self.notes += [f"not read as tensors: {text}" for text in unread[:_MOST_NOTES]]
        if len(unread) > _MOST_NOTES:
            self.notes.append(f"not read as tensors: {len(unread) - _MOST_NOTES} more")

    def _stored(self, key: str, entry: BundleEntry, aliases: list[str]) -> StoredTensor:
        public = [alias for alias in aliases if not any(map(is_private, alias.split("/")))]
        return StoredTensor(
            dtype=entry.dtype,
            shape=entry.shape,
            size_bytes=entry.size_bytes,
            where=self._bundle.where(key),
            aliases=tuple(public),
        )

    def _facts(self, graph: ObjectGraph | None) -> dict[str, object]:
        names = graph.full_names() if graph is not None else {}
        found: dict[str, object] = {
            "names": {path: names[key] for path, key in self._keys.items() if key in names},
            "keys": {path: key for path, key in self._keys.items() if path != key},
            "optimizers": (
                named_optimizers(self._keys) if graph is None else optimizers(graph, self._keys, self.values)
            ),
        }
        iterators = [plain_path(key) for key in self._bundle.entries if key.endswith(_ITERATOR_STATE)]
        return {**found, "position": {"iterators": iterators}} if iterators else found

    def _has_names_only(self) -> bool:
        return GRAPH not in self._bundle.entries

    def _beside(self) -> Iterator[str]:
        meta = self.path.with_name(f"{self.path.name}.meta")
        if os.path.isfile(meta):
            yield f"{meta.name}: the graph of the program, which is not looked into"
        if not is_fast() and self.size_bytes > _LARGE_BYTES:
            yield "pip install 'unbroken[crc32c]' verifies such sizes a good deal faster"


def _apart(path: str, key: str, taken: set[str]) -> str:
    """Return a path that no other tensor has."""
    if path not in taken:
        return path
    path = key
    while path in taken:
        path += "'"
    return path
