"""The constructors that checkpoints name, by what they mean. Nothing is called: values are read off.

Whatever has no entry here is shown as the class it names, with its arguments and its state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from unbroken.inspection.formats.base import printable, row_major, tensor_bytes
from unbroken.inspection.formats.opcodes import Global, Object, Pairs, Persistent
from unbroken.inspection.formats.plain import Constructor, Reading
from unbroken.inspection.formats.views import (
    TORCH_DTYPES,
    Storage,
    View,
    integers,
    make_view,
    numpy_dtype,
    scalar,
)


def read_values(root: Any, storage_of: Callable[[Any], Storage | None]) -> tuple[Any, Reading]:
    """Return what a pickle built as plain values, and the tensors that were found in it.

    `storage_of` returns the storage that a persistent identity means.
    """
    reading = Reading(_CONSTRUCTORS, storage_of)
    return reading.value(root), reading


def unusual(names: Iterable[str]) -> list[str]:
    """Return the classes and functions that are no part of ordinary checkpoints."""
    return sorted(printable(name) for name in names if name not in _CONSTRUCTORS and not _is_a_word(name))


def _is_a_word(name: str) -> bool:
    """Tell whether a global only names a kind of elements, such as `torch.FloatStorage`."""
    module, _, kind = name.rpartition(".")
    return module.partition(".")[0] in ("torch", "numpy") and (
        kind.endswith("Storage") or kind in TORCH_DTYPES or kind in ("dtype", "ndarray")
    )


def _dictionary(reading: Reading, node: Object, path: str, depth: int) -> Any:
    given = node.arguments[-1] if node.arguments else None
    pairs: list[tuple[Any, Any]] = []
    if not reading.affords(given):
        return reading.too_many()
    if isinstance(given, Pairs):
        pairs = given.pairs
    elif isinstance(given, list):
        pairs = [(item[0], item[1]) for item in given if isinstance(item, list | tuple) and len(item) == 2]
    return reading.mapping([*pairs, *node.pairs], path, depth)


def _sequence(reading: Reading, node: Object, path: str, depth: int) -> Any:
    given = node.arguments[0] if node.arguments else ()
    if not reading.affords(given):
        return reading.too_many()
    given = given if isinstance(given, list | tuple) else ()
    return reading.items([*given, *node.items], path, depth)


def _path(reading: Reading, node: Object, path: str, depth: int) -> Any:
    parts = node.arguments
    if not reading.affords(parts):
        return reading.too_many()
    if not all(isinstance(part, str) for part in parts):
        return reading.unknown(node, path, depth)
    if not all(map(reading.affords, parts)):
        return reading.too_many()
    separator = "\\" if "Windows" in node.kind else "/"
    root = parts[0] if parts and parts[0].endswith(separator) else ""
    return printable(root + separator.join(parts[1:] if root else parts))


def _printed(reading: Reading, node: Object, path: str, depth: int) -> Any:
    # Of numbers only: what is printed inside what is printed grows with every level.
    if len(node.arguments) > 3 or not all(_is_number(value) for value in node.arguments):
        return reading.unknown(node, path, depth)
    return f"{node.kind.rpartition('.')[2]}({', '.join(map(repr, node.arguments))})"


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, int | float)


def _encoded(reading: Reading, node: Object, path: str, depth: int) -> Any:
    data = _bytes_of(reading, node)
    return reading.unknown(node, path, depth) if data is None else reading.byte_string(data, path)


def _bytes_of(reading: Reading, node: Any) -> memoryview | None:
    """Return the bytes that a node stands for: old protocols write them as a call with a text in Latin-1."""
    if isinstance(node, memoryview):
        return node
    if not isinstance(node, Object) or _CONSTRUCTORS.get(node.kind) is not _encoded:
        return None
    match node.arguments:
        case ():
            return memoryview(b"")
        case (str() as text, *_):
            return reading.encoded(text)
        case (memoryview() as data, *_):
            return data
        case (Object(kind="_codecs.encode", arguments=(str() as text, *_)), *_):
            return reading.encoded(text)
    return None


def _device(reading: Reading, node: Object, path: str, depth: int) -> Any:
    return ":".join(str(reading.value(item, path, depth + 1)) for item in node.arguments[:2])


def _first(reading: Reading, node: Object, path: str, depth: int) -> Any:
    return reading.value(node.arguments[0] if node.arguments else None, path, depth + 1)


def _of_a_subclass(reading: Reading, node: Object, path: str, depth: int) -> Any:
    match node.arguments:
        case (Global() as function, _, tuple() as arguments, _):
            return reading.object(Object(function.kind, arguments), path, depth + 1)
    return reading.unknown(node, path, depth)


def _tensor(reading: Reading, node: Object, path: str, depth: int) -> Any:
    match node.arguments:
        case (Persistent(identity=identity), offset, shape, strides, *rest):
            storage = reading.storage_of(identity)
            dtype = _v3_dtype(rest) if node.kind.endswith("_v3") else None
            view = storage and make_view(storage, offset, shape, strides, dtype=dtype)
            if view:
                return reading.tensor(view, path)
    return reading.unknown(node, path, depth)


def _v3_dtype(rest: Sequence[Any]) -> str | None:
    # requires_grad, hooks, dtype, metadata.
    found = rest[2] if len(rest) > 2 else None
    return TORCH_DTYPES.get(found.name, "unknown") if isinstance(found, Global) else None


def _array(reading: Reading, node: Object, path: str, depth: int) -> Any:
    match node.state:
        case (int(), shape, dtype, bool() as is_fortran, data):
            view = _array_view(reading, data, shape, dtype, is_fortran)
            if view is not None:
                return reading.tensor(view, path)
    return reading.unknown(node, path, depth)


def _array_of_buffer(reading: Reading, node: Object, path: str, depth: int) -> Any:
    match node.arguments:
        case (data, dtype, shape, order):
            view = _array_view(reading, data, shape, dtype, order == "F")
            if view is not None:
                return reading.tensor(view, path)
    return reading.unknown(node, path, depth)


def _array_view(reading: Reading, data: Any, shape: Any, dtype: Any, is_fortran: bool) -> View | None:
    found, lengths = numpy_dtype(dtype), integers(shape)
    data = _bytes_of(reading, data)
    if found is None or lengths is None or data is None:
        return None
    if tensor_bytes(found[0], lengths) != len(data):
        return None
    strides = tuple(reversed(row_major(lengths[::-1]))) if is_fortran else row_major(lengths)
    storage = Storage(key="", dtype=found[0], data=data)
    return make_view(storage, 0, lengths, strides, big_endian=found[1])


def _scalar(reading: Reading, node: Object, path: str, depth: int) -> Any:
    match node.arguments:
        case (dtype, data):
            view = _array_view(reading, data, (), dtype, False)
            if view is not None and view.storage.data is not None:
                return scalar(bytes(view.storage.data), view.dtype, view.big_endian is True)
    return reading.unknown(node, path, depth)


_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path", "PurePath")
_BUILTINS = ("builtins", "__builtin__")

_CONSTRUCTORS: Mapping[str, Constructor] = {
    "collections.OrderedDict": _dictionary,
    "collections.defaultdict": _dictionary,
    "collections.Counter": _dictionary,
    "collections.deque": _sequence,
    **{f"{root}.dict": _dictionary for root in _BUILTINS},
    **{f"{root}.{kind}": _sequence for root in _BUILTINS for kind in ("set", "frozenset", "list", "tuple")},
    **{f"{root}.{kind}": _printed for root in _BUILTINS for kind in ("complex", "range", "slice")},
    **{f"{root}.{kind}": _encoded for root in _BUILTINS for kind in ("bytes", "bytearray")},
    "_codecs.encode": _encoded,
    **{f"{root}.{kind}": _path for root in ("pathlib", "pathlib._local") for kind in _PATHS},
    "torch.Size": _sequence,
    "torch.device": _device,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_qtensor": _tensor,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "torch._tensor._rebuild_from_type_v2": _of_a_subclass,
    **{
        f"numpy.{core}.multiarray.{name}": way
        for core in ("core", "_core")
        for name, way in (("_reconstruct", _array), ("scalar", _scalar))
    },
    **{f"numpy.{core}.numeric._frombuffer": _array_of_buffer for core in ("core", "_core")},
}
