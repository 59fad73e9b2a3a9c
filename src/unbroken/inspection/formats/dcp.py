"""Directories of `torch.distributed.checkpoint`, which FSDP and Megatron write, too.

`.metadata` says which tensors there are and in which pieces; each piece is a small file of `torch.save`
inside one of the files of the ranks. The metadata are written last: without them nothing was committed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unbroken.checkpoint.finding import Finding
from unbroken.errors import DamagedError, UsageError
from unbroken.inspection.detect import DCP_METADATA as METADATA
from unbroken.inspection.detect import DCP_RANK, open_checkpoint
from unbroken.inspection.formats.base import (
    CheckpointReader,
    RegularFile,
    StoredTensor,
    damaged,
    unreadable,
)
from unbroken.inspection.formats.dcp_metadata import Layout, read_layout
from unbroken.inspection.formats.joined import Parts, nested, placed
from unbroken.inspection.formats.pieces import CutTensor, Piece, Place, Tiling, paste
from unbroken.inspection.formats.safetensors import inside
from unbroken.inspection.formats.slices import FileSlice
from unbroken.inspection.formats.torch_zip import TorchZip
from unbroken.inspection.formats.zips import ZipEntries
from unbroken.storage.failures import translated

_OF_ONE_RANK = re.compile(r"__[0-9]{1,7}\.metadata")
# Each is a file of its own: a setting of an optimizer, an epoch.
_MOST_VALUES = 20_000
_LARGEST_VALUE_BYTES = 256 << 20
_ROOT = "data"
# What Megatron and Lightning put beside the pieces: all that is the same on every rank.
_BESIDE = ("common.pt", "meta.pt")


class DcpDirectory(CheckpointReader):
    """A directory with `.metadata` and the files of ranks."""

    format = "torch.distributed.checkpoint"

    def __init__(self, directory: Path) -> None:
        self.path = directory
        names = _names(directory)
        if METADATA not in names and any(map(_OF_ONE_RANK.fullmatch, names)):
            words = "each rank saved for itself (use_collectives=False): that is not put together"
            raise unreadable(str(directory), words)
        if METADATA not in names:
            count = sum(DCP_RANK.fullmatch(name) is not None for name in names)
            words = f"{count} files of ranks without it: the save was never finished, or is still going on"
            raise damaged(str(directory), METADATA, words)
        file = RegularFile(inside(directory, METADATA))
        self._layout = read_layout(file)
        self._opened: dict[str, RegularFile] = {}
        self.files = {METADATA: file.size_bytes}
        self.problems = []
        self.notes = []
        self._open_files()
        self._wrong = {finding[0]: finding[1] for finding in self._misplaced()}
        self.problems += [Finding(file=METADATA, problem=f"{at}: {why}") for at, why in self._wrong.items()]
        self._paths = _free_paths(self._layout)
        self._names = {path: name for name, path in self._paths.items()}
        self.tensors = {
            self._paths[name]: StoredTensor(
                dtype=tensor.dtype, shape=tensor.shape, size_bytes=tensor.size_bytes, where=_where(tensor)
            )
            for name, tensor in self._layout.tensors.items()
        }
        # Tensors inside of values: theirs are the place of the value, and the path in it.
        self._inner: dict[str, tuple[str, str]] = {}
        self._objects: set[str] = set()
        self._beside = Parts()
        self.values = self._read_values()
        self._read_beside(names)
        self.size_bytes = sum(self.files.values())
        self.facts = {
            "objects": sorted(self._objects),
            "attributes": {},
            "metadata": self._said(names),
            "any_world_size": True,
        }
        self.checksums = "CRC-32 of each entry" if self._has_checksums() else None
        self._note(names)

    def read(self, path: str) -> memoryview:
        """Return the bytes of a tensor, put together from its pieces. Raises DamagedError."""
        if path in self._inner:
            name, inner = self._inner[path]
            return self._value(name).read(inner)
        if path in self._beside.tensors:
            return self._beside.read(path)
        name = self._names[path]
        tensor = self._layout.tensors[name]
        # Before memory is taken for it: a shape is only a claim.
        if name in self._wrong:
            raise damaged(f"{self.path}: tensor {path}", "pieces that tile it", self._wrong[name])
        if len(tensor.pieces) == 1:
            return self._piece(path, tensor, tensor.pieces[0])
        target = bytearray(tensor.size_bytes)
        for piece in tensor.pieces:
            if 0 not in piece.sizes:
                paste(target, tensor, piece, self._piece(path, tensor, piece))
        return memoryview(target)

    def verify(self) -> Iterator[Finding]:
        """Read every piece against its checksums, and against what the metadata say of it."""
        for name, tensor in self._layout.tensors.items():
            if name in self._wrong:
                continue
            for piece in tensor.pieces:
                assert piece.place is not None, "nothing is wrong with it"
                where = f"tensor {self._paths[name]}, piece at {piece.offsets}"
                yield from self._verify(piece.place, where, tensor.dtype, piece.sizes)
        for name, place in self._layout.values.items():
            if place is not None and name not in self._wrong:
                yield from self._verify(place, f"value {self._paths[name]}")
        yield from self._beside.verify()

    def _verify(
        self, place: Place, where: str, dtype: str | None = None, sizes: Sequence[int] = ()
    ) -> Iterator[Finding]:
        if place.transforms:
            # It is there, and said to be unread.
            return
        try:
            reader = self._open(place) if dtype is None else self._open_piece(place, dtype, sizes)
            found = [*reader.problems, *reader.verify()]
        except DamagedError as error:
            yield Finding(file=place.file, problem=f"{where}: {error.message}")
            return
        for finding in found:
            yield Finding(file=place.file, problem=f"{where}: {finding.file}: {finding.problem}")

    def _piece(self, path: str, tensor: CutTensor, piece: Piece) -> memoryview:
        if piece.place is None:
            raise damaged(f"{self.path}: tensor {path}", "the place of its piece", "none")
        return self._open_piece(piece.place, tensor.dtype, piece.sizes).read(_ROOT)

    def _open_piece(self, place: Place, dtype: str, sizes: Sequence[int]) -> TorchZip:
        reader = self._open(place)
        found = reader.tensors.get(_ROOT)
        if found is None or (found.dtype, found.shape) != (dtype, tuple(sizes)):
            words = "no tensor" if found is None else f"{found.dtype} {found.shape}"
            raise damaged(_at(self.path, place), f"{dtype} {tuple(sizes)}", words)
        return reader

    def _value(self, name: str) -> TorchZip:
        place = self._layout.values[name]
        if place is None or name in self._wrong:
            raise damaged(f"{self.path}: value {self._paths[name]}", "its place", "none")
        return self._open(place)

    def _open(self, place: Place) -> TorchZip:
        if place.transforms:
            raise unreadable(_at(self.path, place), _transformed(place))
        file = self._opened[place.file]
        part = FileSlice(file, place.start, place.size_bytes)
        return TorchZip(file.path, ZipEntries(file.path, part))

    def _open_files(self) -> None:
        named: dict[str, list[str]] = {}
        for name, place in self._layout.places():
            named.setdefault(place.file, []).append(name)
        for file, names in sorted(named.items()):
            try:
                self._opened[file] = RegularFile(inside(self.path, file))
            except DamagedError as error:
                more = f" and {len(names) - 1} more pieces" if len(names) > 1 else ""
                self.problems.append(Finding(file=file, problem=f"{error.message}: {names[0]}{more} in it"))
            else:
                self.files[file] = self._opened[file].size_bytes

    def _misplaced(self) -> Iterator[tuple[str, str]]:
        """Yield the names of what is not where it should be, with what is wrong."""
        tiling, ranges = Tiling(), _overlapping(self._layout)
        for name, tensor in self._layout.tensors.items():
            wrong = tiling.problem(tensor.shape, tensor.pieces)
            places = [piece.place for piece in tensor.pieces]
            wrong = wrong or next(filter(None, map(self._wrong_place, places)), None) or ranges.get(name)
            is_plain = not any(place.transforms for place in places if place)
            stored_bytes = sum(place.size_bytes for place in places if place)
            if wrong is None and is_plain and stored_bytes < tensor.size_bytes:
                wrong = f"expected {tensor.size_bytes} bytes in its pieces, found fewer"
            if wrong is not None:
                yield name, wrong
        for name, place in self._layout.values.items():
            wrong = self._wrong_place(place) or ranges.get(name)
            if wrong is not None:
                yield name, wrong

    def _wrong_place(self, place: Place | None) -> str | None:
        if place is None:
            return "where it lies is not said"
        file = self._opened.get(place.file)
        if file is None:
            return f"{place.file} is missing"
        end = place.start + place.size_bytes
        return f"{place.file} ends {end - file.size_bytes} bytes before it" if end > file.size_bytes else None

    def _read_values(self) -> Any:
        found: dict[tuple[str | int, ...], Any] = {}
        for index, name in enumerate(self._layout.values):
            path = self._paths[name]
            if index == _MOST_VALUES:
                self.notes.append(f"more than {_MOST_VALUES} values: the rest is not shown")
                break
            if name not in self._wrong:
                found[self._keys(name)] = self._read_value(name, path)
        for name in self._layout.tensors:
            found[self._keys(name)] = {"$tensor": self._paths[name]}
        return nested(found)

    def _keys(self, name: str) -> tuple[str | int, ...]:
        return self._layout.paths.get(name) or (self._paths[name],)

    def _read_value(self, name: str, path: str) -> Any:
        place = self._layout.values[name]
        if place is not None and place.size_bytes > _LARGEST_VALUE_BYTES:
            self.notes.append(f"value {path} of {place.size_bytes} bytes is not read")
            return f"({place.size_bytes} bytes)"
        if place is not None and place.transforms and name not in self._wrong:
            self.notes.append(f"value {path} is not read: {_transformed(place)}")
            return "(not read)"
        try:
            reader = self._value(name)
        except DamagedError as error:
            self.problems.append(
                Finding(file=place.file if place else METADATA, problem=f"value {path}: {error.message}")
            )
            return "(damaged)"
        return self._taken_in(reader, name, path)

    def _read_beside(self, names: Sequence[str]) -> None:
        for file in _BESIDE:
            if file not in names:
                continue
            try:
                reader = open_checkpoint(inside(self.path, file))
            except UsageError:
                continue
            except DamagedError as error:
                self.problems.append(Finding(file=file, problem=error.message))
                continue
            self.files[file] = reader.size_bytes
            part = file.removesuffix(".pt")
            self._beside.add(f"{part}'" if part in self.values else part, file, reader)
        self.values |= self._beside.values
        self.tensors |= self._beside.tensors
        self.problems += self._beside.problems
        self.notes += self._beside.notes
        self._objects |= self._beside.objects

    def _taken_in(self, reader: TorchZip, name: str, path: str) -> Any:
        """Add the tensors inside of a value to all others, and return the value."""
        for one in reader.problems:
            self.problems.append(Finding(file=one.file, problem=f"value {path}: {one.problem}"))
        self.notes += [f"value {path}: {note}" for note in reader.notes]
        self._objects.update(reader.facts["objects"])
        moved = {}
        for inner, entry in reader.tensors.items():
            moved[inner] = self._free(path if inner == _ROOT else f"{path}/{inner}")
            self._inner[moved[inner]] = name, inner
            aliases = tuple(f"{path}/{alias}" for alias in entry.aliases)
            self.tensors[moved[inner]] = replace(entry, aliases=aliases)
        return placed(reader.values, moved)

    def _free(self, path: str) -> str:
        while path in self.tensors:
            path += "'"
        return path

    def _said(self, names: Sequence[str]) -> dict[str, str]:
        ranks = {match[1] for name in self.files if (match := DCP_RANK.fullmatch(name))}
        said = {"version": self._layout.version, "written by ranks": str(len(ranks)) if ranks else None}
        return {key: value for key, value in said.items() if value is not None}

    def _has_checksums(self) -> bool:
        """Tell whether the first piece that can be opened has them: writers leave out all or none."""
        for name, place in self._layout.places():
            if name not in self._wrong and not place.transforms:
                try:
                    return self._open(place).checksums is not None
                except DamagedError:
                    continue
        return True

    def _note(self, names: Sequence[str]) -> None:
        places = {name: place for name, place in self._layout.places() if place.transforms}
        for name in places.keys() & self._layout.tensors.keys() - self._wrong.keys():
            self.notes.append(f"tensor {self._paths[name]} is not read: {_transformed(places[name])}")
        for name, why in self._layout.unread.items():
            self.notes.append(f"tensor {name} is not read: {why}")
        strangers = [name for name in names if DCP_RANK.fullmatch(name) and name not in self.files]
        if strangers:
            words = f"{len(strangers)} files of ranks that it does not name, {strangers[0]} for one"
            self.notes.append(f"{words}: of another save")


def _names(directory: Path) -> list[str]:
    with translated("list", str(directory)):
        return sorted(path.name for path in directory.iterdir())


def _at(directory: Path, place: Place) -> str:
    return f"{directory / place.file}: byte {place.start}"


def _transformed(place: Place) -> str:
    return f"it went through {', '.join(place.transforms)}"


def _where(tensor: CutTensor) -> str:
    files = dict.fromkeys(piece.place.file for piece in tensor.pieces if piece.place is not None)
    pieces = f"{len(tensor.pieces)} pieces in " if len(tensor.pieces) > 1 else ""
    return f"{pieces}{', '.join([*files][:3])}{', ...' if len(files) > 3 else ''}"


def _free_paths(layout: Layout) -> dict[str, str]:
    """Return the path of each name, every one once."""
    found: dict[str, str] = {}
    taken: set[str] = set()
    for name in (*layout.tensors, *layout.values):
        path = "/".join(map(str, layout.paths.get(name, (name,))))
        while path in taken:
            path += "'"
        taken.add(path)
        found[name] = path
    return found


def _overlapping(layout: Layout) -> dict[str, str]:
    """Return the names of what lies where something else lies, too."""
    by_file: dict[str, list[tuple[int, int, str]]] = {}
    for name, place in layout.places():
        by_file.setdefault(place.file, []).append((place.start, place.start + place.size_bytes, name))
    found: dict[str, str] = {}
    for file, ranges in by_file.items():
        end, before = 0, ""
        for start, finish, name in sorted(ranges):
            if start < end:
                found[name] = f"in {file} it lies where {before} lies, too"
            if finish > end:
                end, before = finish, name
    return found
