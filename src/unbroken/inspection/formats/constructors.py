"""The constructors that checkpoints name, by what they mean. Nothing is called: values are read off.

Whatever has no entry here is shown as the class it names, with its arguments and its state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from unbroken.inspection.formats.base import encodable, row_major, tensor_bytes
from unbroken.inspection.formats.opcodes import Global, Object, Pairs, Persistent
from unbroken.inspection.formats.plain import Constructor, Reading, is_small_number, is_something, join
from unbroken.inspection.formats.views import (
    TORCH_DTYPES,
    Storage,
    View,
    integers,
    is_part_of_storage,
    make_view,
    numpy_dtype,
    scalar,
    storage_in_words,
)


def read_values(root: Any, storage_of: Callable[[Any], Storage | None]) -> tuple[Any, Reading]:
    """Return what a pickle built as plain values, and the tensors that were found in it.

    `storage_of` returns the storage that a persistent identity means.
    """
    reading = Reading(_CONSTRUCTORS, storage_of)
    return reading.value(root), reading


def unusual(names: Iterable[str]) -> list[str]:
    """Return the classes and functions that are no part of ordinary checkpoints."""
    return sorted(encodable(name) for name in names if name not in _CONSTRUCTORS and not _is_a_word(name))


def _is_a_word(name: str) -> bool:
    """Tell whether a global only names a kind of elements, such as `torch.FloatStorage`."""
    module, _, kind = name.rpartition(".")
    return module.partition(".")[0] in ("torch", "numpy") and (
        kind.endswith("Storage") or kind in TORCH_DTYPES or kind in _WORDS
    )


def _dictionary(reading: Reading, node: Object, path: str, depth: int) -> Any:
    given = node.arguments[-1] if node.arguments else None
    pairs: list[tuple[Any, Any]] = []
    if not reading.affords(given):
        return reading.too_many()
    if isinstance(given, Pairs):
        pairs = [*given.pairs]
    elif isinstance(given, list):
        pairs = [(item[0], item[1]) for item in given if isinstance(item, list | tuple) and len(item) == 2]
    reading.attach(node.state, path, depth)
    return reading.mapping([*pairs, *node.pairs], path, depth)


def _sequence(reading: Reading, node: Object, path: str, depth: int) -> Any:
    given = node.arguments[0] if node.arguments else ()
    if not reading.affords(given):
        return reading.too_many()
    given = given if isinstance(given, list | tuple) else ()
    reading.attach(node.state, path, depth)
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
    return encodable(root + separator.join(parts[1:] if root else parts))


def _printed(reading: Reading, node: Object, path: str, depth: int) -> Any:
    # Of numbers only: what is printed inside what is printed grows with every level.
    if len(node.arguments) > 3 or not all(map(is_small_number, node.arguments)):
        return reading.unknown(node, path, depth)
    return f"{node.kind.rpartition('.')[2]}({', '.join(map(repr, node.arguments))})"


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
    # A kind and a number only, for the same reason.
    if not all(isinstance(value, str | int) for value in node.arguments):
        return reading.unknown(node, path, depth)
    return ":".join(str(reading.value(item, path, depth + 1)) for item in node.arguments[:2])


def _parameter(reading: Reading, node: Object, path: str, depth: int) -> Any:
    # The tensor, whether it has a gradient, hooks, and what hangs on it.
    found = reading.value(node.arguments[0] if node.arguments else None, path, depth + 1)
    return _with_state(reading, found, node.arguments[3:4], path, depth)


def _of_a_subclass(reading: Reading, node: Object, path: str, depth: int) -> Any:
    match node.arguments:
        case (Global() as function, _, tuple() as arguments, state):
            found = reading.object(Object(function.kind, arguments), path, depth + 1)
            return _with_state(reading, found, (state,), path, depth)
    return reading.unknown(node, path, depth)


def _with_state(reading: Reading, found: Any, states: Sequence[Any], path: str, depth: int) -> Any:
    """Return a tensor as it was found, with what hangs on it: a subclass may keep more than numbers."""
    if not any(map(is_something, states)):
        return found
    inner = found if isinstance(found, dict) else {"value": found}
    return {**inner, "attributes": reading.value(states[0], join(path, "(attributes)"), depth + 1)}


def _tensor(reading: Reading, node: Object, path: str, depth: int) -> Any:
    match node.arguments:
        case (Persistent(identity=identity), offset, shape, strides, *rest):
            view, why = _torch_view(reading, node.kind, identity, (offset, shape, strides), rest)
            if view is None:
                reading.unread(path, why)
                return reading.unknown(node, path, depth)
            found = reading.tensor(view, path)
            if node.kind.endswith("_rebuild_qtensor"):
                # The numbers mean nothing without their scale.
                quantizer = rest[0] if rest else None
                found["quantizer"] = reading.value(quantizer, join(path, "quantizer"), depth + 1)
            return found
    reading.unread(path, f"{encodable(node.kind)} of other arguments")
    return reading.unknown(node, path, depth)


def _torch_view(
    reading: Reading, kind: str, identity: Any, place: tuple[Any, Any, Any], rest: Sequence[Any]
) -> tuple[View | None, str]:
    """Return the view of a storage, or None and why there is none."""
    storage = reading.storage_of(identity)
    if storage is None or is_part_of_storage(identity):
        return None, storage_in_words(identity)
    # requires_grad, hooks, then the dtype in the third version, and then what else holds of the numbers.
    is_third = kind.endswith("_v3")
    metadata = rest[3:4] if is_third else rest[2:3]
    if kind.endswith(("_v2", "_v3")) and not all(map(_says_nothing, metadata)):
        return None, "its numbers are to be negated or conjugated"
    dtype = None
    if is_third:
        named = rest[2] if len(rest) > 2 else None
        name = named.name if isinstance(named, Global) else ""
        dtype = TORCH_DTYPES.get(name)
        if dtype is None:
            return None, f"elements of the kind {encodable(name) or '(none)'}"
    view = make_view(storage, *place, dtype=dtype)
    return view, "no tensor has such a shape"


def _says_nothing(metadata: Any) -> bool:
    pairs = metadata.pairs if isinstance(metadata, Pairs) else None
    return metadata is None or (pairs is not None and not any(value is not False for _, value in pairs))


def _array(reading: Reading, node: Object, path: str, depth: int) -> Any:
    match node.state:
        case (int(), shape, dtype, bool() as is_fortran, data):
            view = _array_view(reading, data, shape, dtype, is_fortran)
            if view is not None:
                return reading.tensor(view, path)
    reading.unread(path, "an array of a kind that is none of plain numbers")
    return reading.unknown(node, path, depth)


def _array_of_buffer(reading: Reading, node: Object, path: str, depth: int) -> Any:
    match node.arguments:
        case (data, dtype, shape, order):
            view = _array_view(reading, data, shape, dtype, order == "F")
            if view is not None:
                return reading.tensor(view, path)
    reading.unread(path, "an array of a kind that is none of plain numbers")
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


# Kinds of arrays, and of quantizers.
_WORDS = (
    "dtype",
    "ndarray",
    "per_tensor_affine",
    "per_channel_affine",
    "per_channel_affine_float_qparams",
)
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
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _of_a_subclass,
    **{
        f"numpy.{core}.multiarray.{name}": way
        for core in ("core", "_core")
        for name, way in (("_reconstruct", _array), ("scalar", _scalar))
    },
    **{f"numpy.{core}.numeric._frombuffer": _array_of_buffer for core in ("core", "_core")},
}
