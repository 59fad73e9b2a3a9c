"""What a pickle says, without doing it: its opcodes build plain data, and an `Object` for all the rest.

A pickle is a program. Here nothing is imported and nothing is called: a global is the two words that name
it, a call is a note of what would have been called with what. The opcodes are those of the standard
library's `pickletools`. Memory is bounded by some 90 bytes for each byte of the input, and both memory and
time by the number of opcodes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from unbroken.inspection.formats.base import damaged

_MOST_OPCODES = 5_000_000
# Longer integers are no counters or seeds, and turning them into decimals takes for ever.
_LONGEST_INTEGER_BYTES = 256
_MOST_MEMOS = 1 << 32
# Two words that are kept once may be joined into a name again and again.
_LONGEST_NAME = 512
_BROKEN = (struct.error, ValueError, IndexError, KeyError, TypeError, OverflowError)


@dataclass(slots=True, eq=False)
class Global:
    """A class or function by its name: two words, never looked up."""

    module: str
    name: str
    kind: str


@dataclass(slots=True, eq=False)
class Object:
    """What a call of `kind` would have made, and what would have been put into it."""

    kind: str
    arguments: Any = ()
    state: Any = None
    # Lists from the first item on: most objects have none, and millions of empty lists are large.
    items: Sequence[Any] = ()
    pairs: Sequence[tuple[Any, Any]] = ()


@dataclass(slots=True, eq=False)
class Pairs:
    """A dictionary. Its keys are not hashed: a hostile file could make that take for ever."""

    pairs: Sequence[tuple[Any, Any]] = ()


@dataclass(slots=True, eq=False)
class Persistent:
    """An object that lies outside the pickle, by the identity that was written for it."""

    identity: Any


class Marker:
    """The place on the stack where the arguments of a later opcode begin."""


_MARK = Marker()


class Machine:
    """Reads pickles from `data`, one after another, from `position` on."""

    def __init__(self, data: bytes | bytearray, where: str, *, most_opcodes: int | None = None) -> None:
        self.position = 0
        self._most_opcodes = most_opcodes or _MOST_OPCODES
        self.globals: dict[str, int] = {}
        self._bytes = data
        self._data = memoryview(data).toreadonly()
        self._where = where
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._kinds: dict[tuple[str, str], str] = {}

    def load(self) -> Any:
        """Return what the pickle at `position` stands for. Raises DamagedError if it is none."""
        self.stack, self._memo = [], {}
        try:
            return self._run()
        except _BROKEN as error:
            raise damaged(
                f"{self._where}: byte {self.position}", "a pickle", f"{type(error).__name__}: {error}"
            ) from error

    def _run(self) -> Any:
        data, ways, stack, memo = self._bytes, _WAYS, self.stack, self._memo
        four_bytes, position = _U32.unpack_from, self.position
        try:
            for _ in range(self._most_opcodes):
                code = data[position]
                # Most opcodes are of the memo, or small numbers: these are not called for. What a number
                # lacks at the end of the file is missed by the next opcode.
                if code == _LONG_PUT:
                    memo[four_bytes(data, position + 1)[0]] = stack[-1]
                    position += 5
                elif code == _GET:
                    stack.append(memo[data[position + 1]])
                    position += 2
                elif code == _NUMBER:
                    stack.append(data[position + 1])
                    position += 2
                elif code == _TUPLE_OF_ONE:
                    stack[-1] = (stack[-1],)
                    position += 1
                elif code == _PUT:
                    memo[data[position + 1]] = stack[-1]
                    position += 2
                else:
                    self.position = position + 1
                    if code == _STOP:
                        return stack.pop()
                    ways.get(code, _no_way)(self)
                    position = self.position
        except _BROKEN:
            # What is done here has not told how far it came.
            self.position = max(self.position, position)
            raise
        raise ValueError(f"more than {self._most_opcodes} opcodes")

    # Arguments that follow an opcode.

    def _take(self, size: int) -> memoryview:
        start, self.position = self.position, self.position + size
        if size < 0 or self.position > len(self._data):
            raise ValueError("it ends in the middle")
        return self._data[start : self.position]

    def _number(self, form: struct.Struct) -> Any:
        (value,) = form.unpack_from(self._data, self.position)
        self.position += form.size
        return value

    def _byte(self) -> int:
        self.position += 1
        return self._data[self.position - 1]

    def _line(self, encoding: str = "utf-8") -> str:
        start = self.position
        end = self._bytes.index(b"\n", start)
        self.position = end + 1
        return str(self._data[start:end], encoding)

    def _text(self, size: int) -> str:
        return str(self._take(size), "utf-8", "surrogatepass")

    def _unicode(self) -> None:
        # The names of tensors and storages: not by way of the others, which takes twice as long.
        start = self.position + _U32.size
        (size,) = _U32.unpack_from(self._data, self.position)
        self.position = start + size
        if self.position > len(self._data):
            raise ValueError("it ends in the middle")
        self.stack.append(str(self._data[start : self.position], "utf-8", "surrogatepass"))

    def _integer(self, size: int) -> int | str:
        data = self._take(size)
        if size > _LONGEST_INTEGER_BYTES:
            return f"(an integer of {size} bytes)"
        return int.from_bytes(data, "little", signed=True)

    # The stack.

    def _since_mark(self) -> list[Any]:
        stack = self.stack
        for index in range(len(stack) - 1, -1, -1):
            if stack[index] is _MARK:
                found = stack[index + 1 :]
                del stack[index:]
                return found
        raise ValueError("no mark")

    def _last(self, count: int) -> tuple[Any, ...]:
        found = tuple(self.stack[-count:])
        if len(found) < count:
            raise ValueError("an empty stack")
        del self.stack[-count:]
        return found

    def _dict(self) -> None:
        self.stack.append(Pairs(_paired(self._since_mark())))

    def _frozenset(self) -> None:
        self.stack.append(Object("builtins.frozenset", items=self._since_mark()))

    def _append(self) -> None:
        (value,) = self._last(1)
        _extend(self.stack[-1], [value])

    def _appends(self) -> None:
        values = self._since_mark()
        _extend(self.stack[-1], values)

    def _set_item(self) -> None:
        values = self._last(2)
        _pairs_of(self.stack[-1]).append((values[0], values[1]))

    def _set_items(self) -> None:
        values = self._since_mark()
        _pairs_of(self.stack[-1]).extend(_paired(values))

    # The memo.

    def _put(self, index: int) -> None:
        if not 0 <= index < _MOST_MEMOS:
            raise ValueError(f"memo {index}")
        self._memo[index] = self.stack[-1]

    def _memoize(self) -> None:
        self._memo[len(self._memo)] = self.stack[-1]

    def _get(self, index: int) -> None:
        self.stack.append(self._memo[index])

    # Names and calls: noted, not followed.

    def _name(self, module: Any, name: Any) -> Global:
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("a name that is no text")
        if len(module) + len(name) > _LONGEST_NAME:
            raise ValueError(f"a name of {len(module) + len(name)} characters")
        kind = self._kinds.setdefault((module, name), f"{module}.{name}")
        self.globals[kind] = self.globals.get(kind, 0) + 1
        return Global(module, name, kind)

    def _global(self) -> None:
        module = self._line()
        self.stack.append(self._name(module, self._line()))

    def _stack_global(self) -> None:
        module, name = self._last(2)
        self.stack.append(self._name(module, name))

    def _call(self, function: Any, arguments: Any) -> None:
        if not isinstance(arguments, tuple):
            raise TypeError("a call without arguments")
        if isinstance(function, Global):
            self.stack.append(Object(function.kind, arguments))
        else:
            self.stack.append(Object(_UNNAMED, (function, arguments)))

    def _reduce(self) -> None:
        arguments = self.stack.pop()
        self._call(self.stack.pop(), arguments)

    def _new_with_names(self) -> None:
        kind, arguments, names = self._last(3)
        self._call(kind, (arguments, names))

    def _instance(self) -> None:
        module = self._line()
        kind = self._name(module, self._line())
        self._call(kind, tuple(self._since_mark()))

    def _old_object(self) -> None:
        kind, *arguments = self._since_mark()
        self._call(kind, tuple(arguments))

    def _set_state(self) -> None:
        (state,) = self._last(1)
        if not isinstance(self.stack[-1], Object):
            raise TypeError("a state for what has none")
        self.stack[-1].state = state

    def _persistent_line(self) -> None:
        self.stack.append(Persistent(self._line()))

    def _persistent(self) -> None:
        self.stack[-1] = Persistent(self.stack[-1])

    def _extension(self, number: int) -> None:
        self.stack.append(self._name("copyreg", f"extension {number}"))


def _extend(target: Any, values: list[Any]) -> None:
    if isinstance(target, Object):
        if not isinstance(target.items, list):
            target.items = []
        target.items.extend(values)
    elif isinstance(target, list):
        target.extend(values)
    else:
        raise TypeError("an append to what is no list")


def _pairs_of(target: Any) -> list[tuple[Any, Any]]:
    if not isinstance(target, Object | Pairs):
        raise TypeError("an item for what is no dictionary")
    if not isinstance(target.pairs, list):
        target.pairs = []
    return target.pairs


def _paired(values: list[Any]) -> list[tuple[Any, Any]]:
    if len(values) % 2:
        raise ValueError("a key without a value")
    return list(zip(values[::2], values[1::2], strict=True))


def _decimal(text: str) -> bool | int:
    if text in ("00", "01"):
        return text == "01"
    return int(text.removesuffix("L"))


def _quoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _no_way(machine: Machine) -> None:
    raise ValueError(f"opcode {machine._bytes[machine.position - 1]}")


def _skip(machine: Machine, size: int) -> None:
    machine._take(size)


_PUT, _LONG_PUT, _GET, _NUMBER, _TUPLE_OF_ONE = b"qrhK\x85"
_STOP = ord(".")
_UNNAMED = "(a call of a value)"
_U16, _U32, _U64 = (struct.Struct(form) for form in ("<H", "<I", "<Q"))
_I32, _DOUBLE = struct.Struct("<i"), struct.Struct(">d")

_WAYS: dict[int, Callable[[Machine], None]] = {
    ord("\x80"): lambda m: _skip(m, 1),
    ord("\x95"): lambda m: _skip(m, 8),
    ord("("): lambda m: m.stack.append(_MARK),
    ord("0"): lambda m: m.stack.pop(),
    ord("1"): lambda m: m._since_mark().clear(),
    ord("2"): lambda m: m.stack.append(m.stack[-1]),
    ord("N"): lambda m: m.stack.append(None),
    ord("\x88"): lambda m: m.stack.append(True),
    ord("\x89"): lambda m: m.stack.append(False),
    ord("I"): lambda m: m.stack.append(_decimal(m._line())),
    ord("L"): lambda m: m.stack.append(_decimal(m._line())),
    ord("F"): lambda m: m.stack.append(float(m._line())),
    ord("J"): lambda m: m.stack.append(m._number(_I32)),
    ord("K"): lambda m: m.stack.append(m._byte()),
    ord("M"): lambda m: m.stack.append(m._number(_U16)),
    ord("G"): lambda m: m.stack.append(m._number(_DOUBLE)),
    ord("\x8a"): lambda m: m.stack.append(m._integer(m._byte())),
    ord("\x8b"): lambda m: m.stack.append(m._integer(m._number(_I32))),
    ord("S"): lambda m: m.stack.append(_quoted(m._line("latin-1"))),
    ord("V"): lambda m: m.stack.append(m._line("raw-unicode-escape")),
    ord("X"): Machine._unicode,
    ord("\x8c"): lambda m: m.stack.append(m._text(m._byte())),
    ord("\x8d"): lambda m: m.stack.append(m._text(m._number(_U64))),
    # Byte strings stay where they are: an array may be as large as the file.
    ord("T"): lambda m: m.stack.append(m._take(m._number(_I32))),
    ord("U"): lambda m: m.stack.append(m._take(m._byte())),
    ord("B"): lambda m: m.stack.append(m._take(m._number(_U32))),
    ord("C"): lambda m: m.stack.append(m._take(m._byte())),
    ord("\x8e"): lambda m: m.stack.append(m._take(m._number(_U64))),
    ord("\x96"): lambda m: m.stack.append(m._take(m._number(_U64))),
    ord(")"): lambda m: m.stack.append(()),
    ord("\x85"): lambda m: m.stack.append(m._last(1)),
    ord("\x86"): lambda m: m.stack.append(m._last(2)),
    ord("\x87"): lambda m: m.stack.append(m._last(3)),
    ord("t"): lambda m: m.stack.append(tuple(m._since_mark())),
    ord("]"): lambda m: m.stack.append([]),
    ord("l"): lambda m: m.stack.append(m._since_mark()),
    ord("a"): Machine._append,
    ord("e"): Machine._appends,
    ord("}"): lambda m: m.stack.append(Pairs()),
    ord("d"): Machine._dict,
    ord("s"): Machine._set_item,
    ord("u"): Machine._set_items,
    ord("\x8f"): lambda m: m.stack.append(Object("builtins.set")),
    ord("\x90"): Machine._appends,
    ord("\x91"): Machine._frozenset,
    ord("p"): lambda m: m._put(int(m._line())),
    ord("q"): lambda m: m._put(m._byte()),
    ord("r"): lambda m: m._put(m._number(_U32)),
    ord("\x94"): Machine._memoize,
    ord("g"): lambda m: m._get(int(m._line())),
    ord("h"): lambda m: m._get(m._byte()),
    ord("j"): lambda m: m._get(m._number(_U32)),
    ord("c"): Machine._global,
    ord("\x93"): Machine._stack_global,
    ord("R"): Machine._reduce,
    ord("\x81"): Machine._reduce,
    ord("\x92"): Machine._new_with_names,
    ord("i"): Machine._instance,
    ord("o"): Machine._old_object,
    ord("b"): Machine._set_state,
    ord("P"): Machine._persistent_line,
    ord("Q"): Machine._persistent,
    ord("\x82"): lambda m: m._extension(m._byte()),
    ord("\x83"): lambda m: m._extension(m._number(_U16)),
    ord("\x84"): lambda m: m._extension(m._number(_I32)),
}
