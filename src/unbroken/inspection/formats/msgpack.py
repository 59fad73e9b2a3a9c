"""MessagePack, walked through without reading what byte strings and extensions hold."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from unbroken.inspection.formats.base import RegularFile, damaged

_DEEPEST = 64
_MOST_VALUES = 5_000_000
_LONGEST_TEXT_BYTES = 1 << 20
_WINDOW_BYTES = 1 << 18
# By their first byte: how a number behind it is written.
_NUMBERS = {
    0xCA: ">f",
    0xCB: ">d",
    0xCC: ">B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
# The lengths of these take one, two or four bytes.
_TEXTS, _BYTES, _EXTENSIONS = (0xD9, 0xDA, 0xDB), (0xC4, 0xC5, 0xC6), (0xC7, 0xC8, 0xC9)
_LISTS, _MAPS = (0xDC, 0xDD), (0xDE, 0xDF)
_FIXED_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}


@dataclass(frozen=True, slots=True)
class Bytes:
    """A byte string, by where it lies."""

    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Extension:
    """A value of a kind that a library has added, by the code of that and where it lies."""

    code: int
    start: int
    size_bytes: int


class Walker:
    """Reads values from `position` to `end`, which is the end of the file if it is None."""

    def __init__(self, file: RegularFile, position: int = 0, end: int | None = None) -> None:
        self.position = position
        self._file = file
        self._end = file.size_bytes if end is None else end
        self._left = _MOST_VALUES
        self._window = bytearray()
        self._window_start = position

    def value(self, depth: int = 0) -> Any:
        """Return the value at `position` and pass over it. Raises DamagedError."""
        self._left -= 1
        if self._left < 0 or depth > _DEEPEST:
            raise damaged(self._where(), f"at most {_MOST_VALUES} values, {_DEEPEST} deep", "more")
        code = self._take(1)[0]
        if code < 0x80 or code >= 0xE0:
            return code if code < 0x80 else code - 0x100
        if code < 0xC0:
            return self._short(code, depth)
        if code in _CONSTANTS:
            return _CONSTANTS[code]
        if code in _NUMBERS:
            return struct.unpack(_NUMBERS[code], self._take(struct.calcsize(_NUMBERS[code])))[0]
        if code in _FIXED_EXTENSIONS:
            return self._extension(_FIXED_EXTENSIONS[code])
        return self._long(code, depth)

    def _short(self, code: int, depth: int) -> Any:
        if code < 0x90:
            return self._map(code & 0x0F, depth)
        return self._list(code & 0x0F, depth) if code < 0xA0 else self._text(code & 0x1F)

    def _long(self, code: int, depth: int) -> Any:
        for codes, read in ((_TEXTS, self._text), (_BYTES, self._bytes), (_EXTENSIONS, self._extension)):
            if code in codes:
                return read(self._length(1 << codes.index(code)))
        if code in _LISTS:
            return self._list(self._length(2 << _LISTS.index(code)), depth)
        if code in _MAPS:
            return self._map(self._length(2 << _MAPS.index(code)), depth)
        raise damaged(self._where(), "a value of MessagePack", f"byte {code:#x}")

    def _length(self, size: int) -> int:
        return int.from_bytes(self._take(size), "big")

    def _text(self, size: int) -> str:
        if size > _LONGEST_TEXT_BYTES:
            raise damaged(self._where(), f"a text of at most {_LONGEST_TEXT_BYTES} bytes", f"{size}")
        try:
            return self._take(size).decode()
        except UnicodeDecodeError as error:
            raise damaged(self._where(), "a text in UTF-8", f"{error}") from error

    def _bytes(self, size: int) -> Bytes:
        return Bytes(self._pass(size), size)

    def _extension(self, size: int) -> Extension:
        (code,) = struct.unpack(">b", self._take(1))
        return Extension(code, self._pass(size), size)

    def _list(self, count: int, depth: int) -> list[Any]:
        return [self.value(depth + 1) for _ in range(count)]

    def _map(self, count: int, depth: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for _ in range(count):
            key = self.value(depth + 1)
            if not isinstance(key, str | int):
                raise damaged(self._where(), "a text or a number as a key", type(key).__name__)
            found[key] = self.value(depth + 1)
        return found

    def _pass(self, size: int) -> int:
        start, self.position = self.position, self.position + size
        if self.position > self._end:
            raise damaged(self._where(), f"{size} bytes", f"{self._end - start}: it was cut short")
        return start

    def _take(self, size: int) -> bytes:
        start = self._pass(size)
        offset = start - self._window_start
        if offset < 0 or offset + size > len(self._window):
            length = min(max(size, _WINDOW_BYTES), self._end - start)
            self._window, self._window_start, offset = self._file.read(start, length), start, 0
        return bytes(self._window[offset : offset + size])

    def _where(self) -> str:
        return f"{self._file.path}: byte {self.position}"
