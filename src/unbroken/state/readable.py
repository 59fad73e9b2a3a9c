"""Tagged JSON as the nearest plain values, for people, for programs and for comparing.

No class is looked up and no library is needed, so that what a checkpoint says of a program can be shown
and compared when that program, or half of it, is gone: a dataclass becomes its fields, an enum its value,
a tuple or a set a list, a dtype or a device its name. To get the very values back, use a `Decoder`.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable
from typing import Any

# NumPy's kind and size of a scalar, and how `struct` names it.
_STRUCT = {
    "b1": "?",
    "i1": "b",
    "u1": "B",
    "i2": "h",
    "u2": "H",
    "i4": "i",
    "u4": "I",
    "i8": "q",
    "u8": "Q",
    "f2": "e",
    "f4": "f",
    "f8": "d",
}


def readable(encoded: Any) -> Any:
    """Return tagged JSON as dicts with string keys, lists, strings, numbers and None.

    Bytes, complex numbers and ranges become what Python prints of them. A tensor, and what no tag is
    known for, stays tagged.
    """
    if isinstance(encoded, list):
        return [readable(item) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    tag = None
    for key in encoded:
        if key.startswith("$"):
            tag = key
            break
    if tag in _READERS:
        try:
            return _READERS[tag](encoded[tag])
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, struct.error):
            # Not as we write it: what it says is shown, rather than nothing at all.
            return encoded
    return {key: readable(item) for key, item in encoded.items()}


def _pairs(pairs: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, item in pairs:
        name = str(readable(key))
        # Keys 1 and "1" of one dictionary.
        while name in found:
            name += "'"
        found[name] = readable(item)
    return found


def _torch(value: Any) -> Any:
    if "dtype" in value:
        return f"torch.{value['dtype']}"
    return value["device"] if "device" in value else value["size"]


def _numpy(value: Any) -> Any:
    if "dtype" in value:
        return f"dtype {value['dtype']}"
    kind, data = value["scalar"], base64.b64decode(value["bytes"])
    order, name = kind[0], kind[1:]
    if name[0] == "U":
        return data.decode("utf-32-be" if order == ">" else "utf-32-le")
    if name[0] == "c":
        half = f"f{int(name[1:]) // 2}"
        return repr(complex(*struct.unpack(f"{order.replace('|', '=')}2{_STRUCT[half]}", data)))
    return struct.unpack(order.replace("|", "=") + _STRUCT[name], data)[0]


def _bytes(value: Any) -> str:
    return repr(base64.b64decode(value, validate=True))


_READERS: dict[str | None, Callable[[Any], Any]] = {
    "$int": int,
    "$float": float,
    "$complex": lambda value: repr(complex(*readable(value))),
    "$range": lambda value: repr(range(*value)),
    "$bytes": _bytes,
    "$bytearray": _bytes,
    "$tuple": readable,
    "$set": readable,
    "$frozenset": readable,
    "$dict": _pairs,
    "$ordered": _pairs,
    "$counter": _pairs,
    "$defaultdict": lambda value: _pairs(value[1]),
    "$deque": lambda value: readable(value[1]),
    "$enum": lambda value: readable(value[1]),
    "$path": str,
    "$namedtuple": lambda value: readable(value[1]),
    "$dataclass": lambda value: readable(value[1]),
    "$torch": _torch,
    "$numpy": _numpy,
}
