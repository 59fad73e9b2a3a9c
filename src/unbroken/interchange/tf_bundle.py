"""TensorFlow's checkpoints (`P.index` and `P.data-SSSSS-of-NNNNN`): what is in them, and all their bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from unbroken.checkpoint.finding import Finding
from unbroken.errors import DamagedError, StorageError, UsageError
from unbroken.interchange import tf_payloads
from unbroken.interchange.files import RegularFile, damaged, unreadable
from unbroken.interchange.marks import INDEX
from unbroken.interchange.table import Table
from unbroken.interchange.tf_dtypes import widened
from unbroken.interchange.tf_entries import (
    BundleEntry,
    BundleHeader,
    Extent,
    parse_entry,
    parse_header,
    slice_key,
    slice_shape,
)
from unbroken.interchange.tf_slices import check_tiling, put_together

_PIECE = b"\0"


class TfBundle:
    """An open bundle: its index has been read and held against its checksums, and no tensor yet.

    `entries` are the tensors by their keys in the file, `problems` what is missing or impossible as far as
    the index and the sizes of files tell.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        if not os.path.isfile(index_of(prefix)):
            raise damaged(
                str(index_of(prefix)),
                "the index of a checkpoint",
                "none: its save did not end, or it is lost",
            )
        self.index = RegularFile(index_of(prefix))
        self.entries: dict[str, BundleEntry] = {}
        self.problems: list[Finding] = []
        self._pieces: dict[bytes, BundleEntry] = {}
        self._names: dict[str, bytes] = {}
        self._shard_names: dict[int, str] = {}
        self.header = self._read_index()
        self.shards = self._open_shards()
        self._places = self._take_places()
        for key, entry in self.entries.items():
            if entry.slices:
                self._check_pieces(key, entry)

    @property
    def files(self) -> dict[str, int]:
        """The names of the files that are there, and their sizes."""
        shards = {file.path.name: file.size_bytes for file in self.shards.values()}
        return {self.index.path.name: self.index.size_bytes, **shards}

    def where(self, key: str) -> str:
        """Return the name of the file that a tensor is in, or begins in."""
        entry = self.entries[key]
        if entry.slices:
            entry = self._pieces.get(slice_key(self._names[key], entry.slices[0]), entry)
        return self._shard_name(entry.shard)

    def read(self, key: str) -> bytearray:
        """Return the elements of a tensor of numbers, row-major and little-endian; pieces are put together.

        Raises:
            DamagedError: they are not all there, or not what their checksum says.
            StorageError: it is none of numbers.
        """
        entry = self.entries[key]
        if not entry.element.is_number:
            raise unreadable(key, f"{entry.element.name} is none of numbers")
        if self.header.is_big_endian:
            raise unreadable(key, "bundles of big-endian machines are listed only")
        if entry.slices:
            if entry.size_bytes > sum(self.files.values()):
                raise damaged(key, f"{entry.size_bytes} bytes of pieces", "files that are smaller")
            data = put_together(entry, lambda extents: self._read_piece(key, extents), key)
        else:
            data = tf_payloads.read_numbers(self._shard(entry), entry, key)
        return widened(data, entry.element)

    def strings(self, key: str) -> list[bytes]:
        """Return the elements of a tensor of strings. Raises DamagedError, StorageError."""
        entry = self.entries[key]
        if entry.element.name != "string":
            raise unreadable(key, f"{entry.element.name} is none of strings")
        return tf_payloads.read_strings(self._shard(entry), entry, key)

    def verify(self) -> Iterator[Finding]:
        """Read every byte of every file that is there against its checksum, and yield what is damaged."""
        for shard, file in self.shards.items():
            for _, _, key, entry in self._places.get(shard, []):
                try:
                    tf_payloads.check(file, entry, f"tensor {key}")
                except (DamagedError, StorageError) as error:
                    yield Finding(file=file.path.name, problem=error.message)
            yield from self._check_padding(shard, file)

    def _read_index(self) -> BundleHeader:
        header = None
        for key, value in Table(self.index).entries():
            if header is None:
                header = parse_header(value, str(self.index.path)) if key == b"" else None
                if header is None:
                    raise damaged(str(self.index.path), "a header of a bundle", f"{key[:100]!r}")
                continue
            name = key.decode("utf-8", "backslashreplace")
            try:
                entry = parse_entry(value, f"tensor {name}")
            except DamagedError as error:
                self.problems.append(Finding(file=self.index.path.name, problem=error.message))
                continue
            if key.startswith(_PIECE):
                self._pieces[key] = entry
            else:
                self.entries[name], self._names[name] = entry, key
        if header is None:
            raise damaged(str(self.index.path), "a header of a bundle", "an empty table")
        return header

    def _open_shards(self) -> dict[int, RegularFile]:
        found: dict[int, RegularFile] = {}
        for shard in range(self.header.shards):
            path = self.prefix.with_name(self._shard_name(shard))
            try:
                found[shard] = RegularFile(_inside(path, self.index.path))
            except (DamagedError, StorageError, UsageError) as error:
                self.problems.append(Finding(file=path.name, problem=error.message))
        return found

    def _take_places(self) -> dict[int, list[tuple[int, int, str, BundleEntry]]]:
        """Return what lies in each file, in order; what overlaps or lies beyond its end is a problem."""
        found: dict[int, list[tuple[int, int, str, BundleEntry]]] = {}
        for key, entry in [
            *self.entries.items(),
            *((str(key), entry) for key, entry in self._pieces.items()),
        ]:
            if not entry.slices:
                found.setdefault(entry.shard, []).append((entry.offset, entry.stored_bytes, key, entry))
        for shard, places in found.items():
            places.sort(key=lambda place: place[:3])
            self._check_places(shard, places)
        return found

    def _check_places(self, shard: int, places: list[tuple[int, int, str, BundleEntry]]) -> None:
        if shard >= self.header.shards:
            problem = f"tensor {places[0][2]}: in file {shard} of {self.header.shards}"
            self.problems.append(Finding(file=self.index.path.name, problem=problem))
            return
        end, kept = 0, []
        file = self.shards.get(shard)
        for offset, size, key, entry in places:
            if size and offset < end:
                problem = f"tensor {key}: overlaps the one before it"
            elif file is not None and offset + size > file.size_bytes:
                problem = f"tensor {key}: the file ends {offset + size - file.size_bytes} bytes before it"
            else:
                end = max(end, offset + size)
                kept.append((offset, size, key, entry))
                continue
            self.problems.append(Finding(file=self._shard_name(shard), problem=problem))
        # What overlaps is not read: a small index could have a large file read again and again.
        places[:] = kept

    def _check_pieces(self, key: str, entry: BundleEntry) -> None:
        for extents in entry.slices:
            piece = self._pieces.get(slice_key(self._names[key], extents))
            expected = (entry.element.name, slice_shape(extents, entry.shape))
            if piece is None or piece.slices or (piece.element.name, piece.shape) != expected:
                problem = f"expected a piece {expected[0]} {expected[1]} at {extents}, found another or none"
                self.problems.append(Finding(file=self.index.path.name, problem=f"tensor {key}: {problem}"))
                return
        try:
            check_tiling(entry, f"tensor {key}")
        except (DamagedError, StorageError) as error:
            self.problems.append(Finding(file=self.index.path.name, problem=error.message))

    def _check_padding(self, shard: int, file: RegularFile) -> Iterator[Finding]:
        places = [(offset, size) for offset, size, _, _ in self._places.get(shard, [])]
        for start, end in tf_payloads.unowned(file, places):
            # Where tensors are aligned, zeros fill up what is between them.
            if any(any(piece) for piece in file.pieces(start, end - start)):
                yield Finding(file=file.path.name, problem=f"bytes {start} to {end} are nobody's")

    def _read_piece(self, key: str, extents: tuple[Extent, ...]) -> bytearray:
        piece = self._pieces.get(slice_key(self._names[key], extents))
        if piece is None or piece.shape != slice_shape(extents, self.entries[key].shape):
            raise damaged(key, f"a piece at {extents}", "none")
        return tf_payloads.read_numbers(self._shard(piece), piece, key)

    def _shard(self, entry: BundleEntry) -> RegularFile:
        file = self.shards.get(entry.shard)
        if file is None:
            raise damaged(self._shard_name(entry.shard), "a file beside the index", "none that is read")
        return file

    def _shard_name(self, shard: int) -> str:
        name = self._shard_names.get(shard)
        if name is None:
            name = f"{self.prefix.name}.data-{shard:05d}-of-{self.header.shards:05d}"
            self._shard_names[shard] = name
        return name


def index_of(prefix: Path) -> Path:
    """Return the file that says what is in a bundle."""
    return prefix.with_name(prefix.name + INDEX)


def _inside(path: Path, index: Path) -> Path:
    """Return the path of a data file. Raises DamagedError if there is none, or it is a link to elsewhere."""
    if not os.path.exists(path):
        raise damaged(path.name, "a file beside the index", "none")
    # The cache of a model hub keeps all files in one place, and links to them from each revision.
    if path.resolve().parent not in (path.parent.resolve(), index.resolve().parent):
        raise damaged(path.name, "a file beside the index", f"a link to {path.resolve()}")
    return path
