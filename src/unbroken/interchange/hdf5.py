"""What is in an HDF5 file: groups, attributes, and where the numbers of its arrays lie. Nothing is executed.

Headers are parsed by pyfive, which is Python alone: the C library of HDF5 has crashed on made-up files.
"""

from __future__ import annotations

import io
import math
import struct
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from unbroken.errors import UsageError
from unbroken.interchange.files import damaged, encodable, unreadable
from unbroken.interchange.hdf5_messages import Kind, Layout, kind_of, layout_of, shape_of

MAGIC = b"\x89HDF\r\n\x1a\n"
ReadRange = Callable[[int, int], bytes | bytearray | memoryview]

_DATASPACE, _DATATYPE, _LINK, _EXTERNAL_FILES, _LAYOUT, _SYMBOLS, _LINK_INFO = 1, 3, 6, 7, 8, 17, 2
_HARD, _SOFT = 0, 1
_MOST_OBJECTS = 200_000
_DEEPEST = 64
# What headers may take to read: a file whose headers lead in circles is not read for ever.
_MOST_READS = 2_000_000
_LEAST_ALLOWED_BYTES = 64 << 20
_LARGEST_ATTRIBUTE_ITEMS = 1 << 20
_BROKEN = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    BufferError,
    EOFError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """An array in a file; `unread` says why its numbers cannot be read, if they cannot.

    `layout` says where they lie, `aliases` are further paths to it.
    """

    path: str
    kind: Kind
    shape: tuple[int, ...]
    size_bytes: int
    layout: Layout
    attributes: dict[str, Any]
    aliases: list[str] = field(default_factory=list)
    unread: str = ""


class Hdf5File:
    """The headers of a file of `size_bytes`, whose bytes `read(start, size_bytes)` gives.

    `arrays` by their paths, such as `layers/dense/vars/0`; `attributes` by the paths of groups, that of the
    root being empty. `problems` are lines, each with the path it is about.

    Raises UsageError without pyfive, DamagedError for a file whose root cannot be read.
    """

    def __init__(self, read: ReadRange, size_bytes: int, where: str) -> None:
        self.arrays: dict[str, Array] = {}
        self.attributes: dict[str, dict[str, Any]] = {}
        self.problems: list[tuple[str, str]] = []
        self.notes: list[str] = []
        self._read, self._size_bytes, self.where = read, size_bytes, where
        self._headers = _Headers(read, size_bytes, where)
        self._soft: list[tuple[str, str]] = []
        self._walk()
        self._resolve_soft_links()

    def read(self, path: str) -> bytearray:
        """Return the numbers of an array as they lie in the file. Raises DamagedError, StorageError."""
        array = self.arrays[path]
        if array.unread:
            raise unreadable(f"{self.where}: {path}", array.unread)
        if not array.size_bytes:
            return bytearray()
        if array.layout.data is not None:
            return bytearray(array.layout.data)
        assert array.layout.address is not None
        return bytearray(self._read(array.layout.address, array.size_bytes))

    def _walk(self) -> None:
        first: dict[int, str] = {}
        queue = deque([(self._headers.root(), "", 0)])
        if self._headers.expected_bytes > self._size_bytes:
            cut = f"expected {self._headers.expected_bytes} bytes, found {self._size_bytes}: it was cut short"
            self.problems.append(("", cut))
        while queue:
            address, path, depth = queue.popleft()
            if address in first:
                self._enter_alias(first[address], path)
                continue
            first[address] = path
            if len(first) > _MOST_OBJECTS or depth > _DEEPEST:
                self.problems.append((path, "too many objects, or too deep: the rest is not listed"))
                return
            try:
                found = self._headers.at(address)
                if found.find_msg_type(_DATASPACE):
                    self._enter_array(path, found)
                else:
                    self.attributes[path] = _plain_attributes(found)
                    queue.extend((to, name, depth + 1) for name, to in self._links(path, found))
            except _BROKEN + self._headers.errors as error:
                if not path:
                    raise damaged(self.where, "a whole HDF5 file", _words(error)) from error
                self.problems.append((path, f"cannot be read: {_words(error)}"))

    def _links(self, path: str, found: Any) -> Iterator[tuple[str, int]]:
        for message in found.find_msg_type(_LINK):
            if _link_type(found.msg_data, message["offset_to_message"]) not in (_HARD, _SOFT):
                self.problems.append((path or "/", "a link into another file, which is not followed"))
                return
        try:
            links = found.get_links()
        except AssertionError as error:
            raise ValueError("links that are damaged, or lead into another file: not followed") from error
        for name, target in links.items():
            if name in ("", ".", "..") or "/" in name:
                raise ValueError(f"a name such as {name[:20]!r}")
            inner = encodable(f"{path}/{name}" if path else name)
            if isinstance(target, str):
                self._soft.append((inner, target if target.startswith("/") else f"{path}/{target}"))
            else:
                yield inner, target

    def _enter_array(self, path: str, found: Any) -> None:
        body = [_body(found, kind) for kind in (_DATASPACE, _DATATYPE, _LAYOUT)]
        shape, attributes = shape_of(body[0]), _plain_attributes(found)
        kind, layout = kind_of(body[1], attributes), layout_of(body[2])
        size = math.prod(shape or ()) * kind.item_bytes
        unread = self._why_unread(kind, layout, size, shape)
        if found.find_msg_type(_EXTERNAL_FILES) or layout.form == "virtual":
            unread = "its numbers lie in another file, which is not opened"
            self.problems.append((path, unread))
        elif unread.startswith("expected"):
            self.problems.append((path, unread))
        self.arrays[path] = Array(
            path=path,
            kind=kind,
            shape=shape or (),
            size_bytes=size,
            layout=layout,
            attributes=attributes,
            unread=unread,
        )

    def _why_unread(self, kind: Kind, layout: Layout, size: int, shape: tuple[int, ...] | None) -> str:
        if shape is None:
            return "it is empty, without a shape"
        if kind.dtype is None:
            return f"it holds {kind.words}"
        if layout.form == "chunked":
            return "its numbers lie in pieces, which only HDF5 itself puts together"
        if layout.form == "contiguous" and size:
            if layout.address is None:
                return "its numbers have never been written"
            if layout.address + size > self._size_bytes:
                return f"expected {layout.address + size} bytes, found {self._size_bytes}"
        if layout.form == "compact" and len(layout.data or b"") != size:
            return f"expected {size} bytes, found {len(layout.data or b'')}"
        return ""

    def _enter_alias(self, first: str, path: str) -> None:
        if first in self.arrays:
            self.arrays[first].aliases.append(path)
        else:
            self.notes.append(f"{path}: the same group as {first or '/'}")

    def _resolve_soft_links(self) -> None:
        for path, target in self._soft:
            to = "/".join(part for part in target.split("/") if part not in ("", "."))
            if to in self.arrays:
                self.arrays[to].aliases.append(path)
            else:
                self.notes.append(f"{path}: a link to {to or '/'}, which is no array")


class _Headers:
    """The object headers of a file, by their addresses."""

    def __init__(self, read: ReadRange, size_bytes: int, where: str) -> None:
        try:
            # Loaded here: it takes NumPy with it, which nothing else needs.
            from pyfive.core import InvalidHDF5File
            from pyfive.dataobjects import DataObjects
            from pyfive.misc_low_level import SuperBlock
        except ImportError as error:
            raise UsageError(
                f"{where}: expected pyfive, which reads HDF5, found it is not installed",
                hint="install it: pip install 'unbroken[hdf5]'",
            ) from error
        self.errors: tuple[type[Exception], ...] = (InvalidHDF5File,)
        self._where = where
        self.expected_bytes = 0
        self._file = _Guarded(read, size_bytes)
        self._make, self._superblock = DataObjects, SuperBlock

    def root(self) -> int:
        """Return the address of the root group. Raises DamagedError."""
        try:
            found = self._superblock(self._file, 0)
            if found._contents["base_address"]:
                raise ValueError("it does not begin at its first byte")
            self.expected_bytes = int(found._contents["end_of_file_address"])
            return int(found.offset_to_dataobjects)
        except _BROKEN + self.errors as error:
            raise damaged(self._where, "a whole HDF5 file", _words(error)) from error

    def at(self, address: int) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self._make(self._file, address, decode_strings=True)


class _Guarded:
    """A file for pyfive that ends its work when headers lead in circles or ask for far more than there is."""

    def __init__(self, read: ReadRange, size_bytes: int) -> None:
        self._file = io.BufferedReader(_Raw(read, size_bytes), 1 << 16)
        self._size_bytes = size_bytes
        self._left_bytes = max(_LEAST_ALLOWED_BYTES, 2 * size_bytes)
        self._left_reads = _MOST_READS

    def read(self, size_bytes: int = -1) -> bytes:
        asked = self._size_bytes if size_bytes < 0 else size_bytes
        self._left_bytes -= min(asked, self._size_bytes)
        self._left_reads -= 1
        if self._left_reads < 0 or self._left_bytes < 0:
            raise ValueError("headers that lead in circles")
        if asked > self._size_bytes:
            raise ValueError(f"a header of {asked} bytes")
        data = self._file.read(asked)
        if size_bytes >= 0 and len(data) < size_bytes:
            raise ValueError("a header beyond the end of the file")
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence == 0 and not 0 <= offset <= self._size_bytes:
            raise ValueError("an address beyond the end of the file")
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


class _Raw(io.RawIOBase):
    """Bytes by their places as a file that can be read."""

    def __init__(self, read: ReadRange, size_bytes: int) -> None:
        self._read, self._size_bytes, self._at = read, size_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        start = (0, self._at, self._size_bytes)[whence]
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, target: Any) -> int:
        size = max(0, min(len(target), self._size_bytes - self._at))
        if size:
            target[:size] = self._read(self._at, size)
        self._at += size
        return size


def _body(found: Any, kind: int) -> bytes:
    """Return the bytes of the message of that kind, which an array has once."""
    message = found.find_msg_type(kind)[0]
    start = message["offset_to_message"]
    return bytes(found.msg_data[start : start + message["size"]])


def _link_type(data: bytes, offset: int) -> int:
    return data[offset + 2] if data[offset + 1] & 8 else _HARD


def _plain_attributes(found: Any) -> dict[str, Any]:
    """Return attributes as text, numbers and lists of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {encodable(name): _plain(value) for name, value in found.get_attributes().items()}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return encodable(value.rstrip(b"\0").decode("utf-8", "backslashreplace"))
    if isinstance(value, str):
        return encodable(value)
    if hasattr(value, "tolist"):
        if getattr(value, "size", 0) > _LARGEST_ATTRIBUTE_ITEMS:
            raise ValueError("an attribute of too many items")
        value = value.tolist()
        return _plain(value) if isinstance(value, bytes | str) else _listed(value)
    return value if isinstance(value, int | float | bool | None) else repr(type(value).__name__)


def _listed(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_listed(item) for item in value]
    return _plain(value)


def _words(error: BaseException) -> str:
    return f"{error}"[:200] or type(error).__name__
