"""Nested state as JSON with tags, its tensors set apart by path. No pickle, and nothing is lost.

JSON has no tuples, no keys but strings, no NaN, no bytes. Such values become an object with one
key that starts with `$` (the table is in docs/format.md); everything else stays plain JSON, so that
a manifest reads well. `encode` takes live values apart, `decode` puts them together again:

    decode(encode({"betas": (0.9, 0.999), 3: b"x"}, ...), ...) == {"betas": (0.9, 0.999), 3: b"x"}
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import math
import pathlib
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias, runtime_checkable

from unbroken.errors import DamagedError, StateMismatchError, UnsupportedStateError
from unbroken.state.table import TensorTable
from unbroken.state.tensors import HostTensor, LoadedTensor, TensorSource

Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None

# Larger byte strings (RNG states) are kept as tensors: they get a digest and stay out of the JSON.
_INLINE_BYTES = 64
# Integers that every JSON reader keeps exactly (RFC 8259, section 6).
_EXACT_INT = 2**53
_BYTES = "bytes"
_JSON_TYPES = (dict, list, str, int, float, type(None))
# Deeper nesting than any state needs, and than recursion and JSON readers bear.
_DEEPEST = 100


class LeafCodec(Protocol):
    """Takes apart the values of one library, chosen by the root module of a value's class."""

    @property
    def root(self) -> str:
        """The root module, such as `torch`."""
        ...

    def encode(self, value: object) -> TensorSource | Json:
        """Return a tensor or JSON for `value`; raise UnsupportedStateError for what cannot be kept."""
        ...

    def decode_tensor(self, tensor: LoadedTensor) -> object:
        """Return the library's own tensor with these bytes."""
        ...

    def decode_value(self, value: Json) -> object:
        """Return what `encode` made this JSON of."""
        ...

    def assign(self, live: object, loaded: object) -> bool:
        """Copy `loaded` into the tensor `live` in place; False if they do not fit or are no tensors."""
        ...


@runtime_checkable
class FillsOnly(Protocol):
    """A codec of a library whose live tensors can be filled, and nothing can take their place."""

    def fills(self, live: object) -> bool:
        """Tell whether `live` is such a tensor."""
        ...

    def misfit(self, live: object, loaded: object) -> str | None:
        """Return why `loaded` cannot be put where `live` is, None if it can or is none of this library's."""
        ...


class Encoder:
    """Encodes values; tensors go to `table`, values of a library to the codec of its root module.

    With `keep_aliases`, tensors of the same memory are kept once: tied weights, which stay tied.
    """

    def __init__(
        self, table: TensorTable, codecs: Iterable[LeafCodec] = (), *, keep_aliases: bool = False
    ) -> None:
        self._table = table
        self._codecs = {codec.root: codec for codec in codecs}
        self._keep_aliases = keep_aliases
        self._open: set[int] = set()
        self._way_of_class: dict[type, Callable[[Any, str], Json]] = {}

    def encode(self, value: object, path: str) -> Json:
        """Return `value` as tagged JSON; `path` is where it stands, for tensors and for errors.

        Raises UnsupportedStateError, naming the place, for functions, open files and other objects.
        """
        kind = type(value)
        way = self._way_of_class.get(kind)
        if way is None:
            way = self._way_of_class[kind] = self._find_way(kind)
        return way(value, path)

    def _find_way(self, kind: type) -> Callable[[Any, str], Json]:
        if kind in _SCALARS:
            return _SCALARS[kind]
        if kind in _CONTAINERS:
            return partial(self._container, _CONTAINERS[kind])
        roots = (cls.__module__.partition(".")[0] for cls in kind.__mro__)
        root = next((root for root in roots if root in self._codecs), None)
        if root is not None:
            return partial(self._library_value, self._codecs[root])
        if kind in (bytes, bytearray):
            return self._bytes
        if issubclass(kind, TensorSource):
            return self._source
        return self._named_class

    def _library_value(self, codec: LeafCodec, value: object, path: str) -> Json:
        try:
            encoded = codec.encode(value)
        except UnsupportedStateError as error:
            raise UnsupportedStateError(f"{path}: {error.message}", hint=error.hint) from None
        # Asked this way round: the check of an abstract class takes several times as long.
        if isinstance(encoded, _JSON_TYPES):
            return {f"${codec.root}": encoded}
        return self._tensor(encoded.library or codec.root, encoded, path)

    def _source(self, source: TensorSource, path: str) -> Json:
        return self._tensor(source.library or "host", source, path)

    def _tensor(self, library: str, source: TensorSource, path: str) -> Json:
        return {"$tensor": self._table.add(path, source, keep_alias=self._keep_aliases), "as": library}

    def _bytes(self, value: bytes | bytearray, path: str) -> Json:
        if len(value) > _INLINE_BYTES and type(value) is bytes:
            return self._tensor(_BYTES, HostTensor("U8", (len(value),), memoryview(value)), path)
        tag = "$bytes" if type(value) is bytes else "$bytearray"
        return {tag: base64.b64encode(value).decode()}

    def _container(self, encode: Callable[[Encoder, Any, str], Json], value: Any, path: str) -> Json:
        if id(value) in self._open:
            raise UnsupportedStateError(
                f"{path}: a container that contains itself",
                hint="break the cycle, or keep it out of the state",
            )
        self._open.add(id(value))
        if len(self._open) > _DEEPEST:
            raise UnsupportedStateError(
                f"{path[:60]}...: cannot keep containers nested {_DEEPEST} deep", hint="flatten the state"
            )
        try:
            return encode(self, value, path)
        finally:
            self._open.discard(id(value))

    def _items(self, values: Any, path: str) -> list[Json]:
        # As a whole where that can be: the names of parameters, the words of a generator.
        kinds = {*map(type, values)}
        if kinds == {str}:
            _text("".join(values), path)
            return list(values)
        if kinds == {int} and max(values) <= _EXACT_INT and min(values) >= -_EXACT_INT:
            return list(values)
        return [self.encode(item, f"{path}/{index}") for index, item in enumerate(values)]

    def _mapping(self, value: Mapping[Any, object], path: str) -> Json:
        encode = self.encode
        if not {*map(type, value)} <= {str}:
            return {"$dict": self._pairs(value, path)}
        names = _text("".join(value), path)
        if not ("$" in names or "%" in names or "/" in names):
            return {name: encode(item, f"{path}/{name}") for name, item in value.items()}
        if any(name.startswith("$") for name in value):
            return {"$dict": self._pairs(value, path)}
        return {name: encode(item, join(path, name)) for name, item in value.items()}

    def _pairs(self, value: Mapping[object, object], path: str) -> list[Json]:
        return [
            [self.encode(key, f"{path}/key"), self.encode(item, join(path, key))]
            for key, item in value.items()
        ]

    def _named_class(self, value: object, path: str) -> Json:
        cls = type(value)
        name = f"{cls.__module__}:{cls.__qualname__}"
        if isinstance(value, pathlib.PurePosixPath):
            return {"$path": str(value)}
        if _find_class(name) is not cls:
            raise UnsupportedStateError(
                f"{path}: cannot keep a value of type {name}, which has no place to be found again",
                hint="define the class at the top of its module",
            )
        if isinstance(value, enum.Enum):
            # By value: combined flags have no name.
            return {"$enum": [name, self.encode(value.value, path)]}
        if isinstance(value, tuple) and hasattr(cls, "_fields"):
            return {"$namedtuple": [name, self._items(value, path)]}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            return {"$dataclass": [name, self._container(Encoder._mapping, fields, path)]}
        raise UnsupportedStateError(
            f"{path}: cannot keep a value of type {name} exactly",
            hint="keep numbers, strings, lists, dicts, arrays or tensors there, "
            "or give its owner state_dict() and load_state_dict()",
        )


class Decoder:
    """Puts encoded values together; `tensors` returns the tensor kept under a path."""

    def __init__(self, tensors: Callable[[str], LoadedTensor], codecs: Iterable[LeafCodec] = ()) -> None:
        self._tensors = tensors
        self._codecs = {codec.root: codec for codec in codecs}

    def decode(self, encoded: Json) -> Any:
        """Return the value. Values of a library without a codec stay `HostTensor` or tagged JSON."""
        if isinstance(encoded, list):
            return [self.decode(item) for item in encoded]
        if not isinstance(encoded, dict):
            return encoded
        tag = next((key for key in encoded if key.startswith("$")), None)
        if tag is None:
            return {key: self.decode(item) for key, item in encoded.items()}
        if tag == "$tensor":
            return self._tensor(encoded)
        if tag in _DECODERS:
            try:
                return _DECODERS[tag](self, encoded[tag])
            except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
                raise DamagedError(
                    f"manifest: expected a value for tag {tag}, found {encoded[tag]!r:.80} ({error})",
                    hint="use another checkpoint",
                ) from error
        codec = self._codecs.get(tag[1:])
        return encoded if codec is None else codec.decode_value(encoded[tag])

    def _tensor(self, encoded: dict[str, Json]) -> object:
        tensor = self._tensors(str(encoded["$tensor"]))
        library = encoded.get("as")
        if library == _BYTES:
            return bytes(tensor.data)
        codec = self._codecs.get(str(library))
        return tensor if codec is None else codec.decode_tensor(tensor)

    def _dict(self, pairs: Any) -> dict[object, object]:
        return {self.decode(key): self.decode(item) for key, item in pairs}

    def _namedtuple(self, encoded: Any) -> object:
        name, items = encoded
        return _loaded_class(name)._make(self.decode(item) for item in items)

    def _dataclass(self, encoded: Any) -> object:
        name, fields = encoded
        cls = _loaded_class(name)
        if not hasattr(cls, "__dataclass_fields__"):
            raise TypeError(f"{name} is no dataclass")
        value = object.__new__(cls)
        for key, item in self.decode(fields).items():
            object.__setattr__(value, key, item)
        return value


def join(path: str, key: object) -> str:
    """Return the path of `key` below `path`; a `/` inside a key is escaped as in URLs."""
    name = str(key)
    if "%" in name or "/" in name:
        name = name.replace("%", "%25").replace("/", "%2F")
    return f"{path}/{name}"


def _loaded_class(name: str) -> Any:
    """Return a class that this program has loaded itself. Nothing is ever imported for a checkpoint."""
    found = _find_class(name)
    if found is None:
        raise StateMismatchError(
            f"the checkpoint holds a value of class {name}, which this program has not loaded",
            hint="import the module that defines it before the run starts",
        )
    return found


def _find_class(name: str) -> Any:
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for attribute in qualname.split("."):
        found = getattr(found, attribute, None)
    return found if isinstance(found, type) else None


def _plain(value: Json, _path: str) -> Json:
    return value


def _int(value: int, _path: str) -> Json:
    return value if -_EXACT_INT <= value <= _EXACT_INT else {"$int": str(value)}


def _float(value: float, _path: str) -> Json:
    return value if math.isfinite(value) else {"$float": repr(value)}


def _factory(factory: object, path: str) -> str:
    for name, known in _FACTORIES.items():
        if factory is known:
            return name
    raise UnsupportedStateError(
        f"{path}: cannot keep a defaultdict that makes its values by {factory!r}",
        hint=f"use one of {', '.join(_FACTORIES)} as its factory, or a plain dict",
    )


def _text(value: str, path: str) -> str:
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UnsupportedStateError(
            f"{path}: cannot keep a text that is no Unicode ({error})", hint="keep it as bytes"
        ) from None
    return value


def _sorted(items: Sequence[Json]) -> list[Json]:
    return sorted(items, key=repr)


_FACTORIES: dict[str, Callable[[], Any] | None] = {
    "none": None,
    "int": int,
    "float": float,
    "str": str,
    "list": list,
    "dict": dict,
    "set": set,
}
_SCALARS: dict[type, Callable[[Any, str], Json]] = {
    type(None): _plain,
    bool: _plain,
    str: _text,
    int: _int,
    float: _float,
    complex: lambda value, path: {"$complex": [_float(value.real, path), _float(value.imag, path)]},
    range: lambda value, _: {"$range": [value.start, value.stop, value.step]},
}
_CONTAINERS: dict[type, Callable[[Encoder, Any, str], Json]] = {
    list: Encoder._items,
    dict: Encoder._mapping,
    tuple: lambda encoder, value, path: {"$tuple": encoder._items(value, path)},
    set: lambda encoder, value, path: {"$set": _sorted(encoder._items(value, path))},
    frozenset: lambda encoder, value, path: {"$frozenset": _sorted(encoder._items(value, path))},
    OrderedDict: lambda encoder, value, path: {"$ordered": encoder._pairs(value, path)},
    defaultdict: lambda encoder, value, path: {
        "$defaultdict": [_factory(value.default_factory, path), encoder._pairs(value, path)]
    },
    Counter: lambda encoder, value, path: {"$counter": encoder._pairs(value, path)},
    deque: lambda encoder, value, path: {"$deque": [value.maxlen, encoder._items(value, path)]},
}
_DECODERS: dict[str, Callable[[Decoder, Any], Any]] = {
    "$int": lambda _, value: int(value),
    "$float": lambda _, value: float(value),
    "$complex": lambda decoder, value: complex(*decoder.decode(value)),
    "$range": lambda _, value: range(*value),
    "$bytes": lambda _, value: base64.b64decode(value, validate=True),
    "$bytearray": lambda _, value: bytearray(base64.b64decode(value, validate=True)),
    "$tuple": lambda decoder, value: tuple(decoder.decode(item) for item in value),
    "$set": lambda decoder, value: {decoder.decode(item) for item in value},
    "$frozenset": lambda decoder, value: frozenset(decoder.decode(item) for item in value),
    "$dict": Decoder._dict,
    "$defaultdict": lambda decoder, value: defaultdict(_FACTORIES[value[0]], decoder._dict(value[1])),
    "$counter": lambda decoder, value: Counter(decoder._dict(value)),
    "$deque": lambda decoder, value: deque(decoder.decode(value[1]), maxlen=value[0]),
    "$ordered": lambda decoder, value: OrderedDict(decoder._dict(value)),
    "$enum": lambda decoder, value: _loaded_class(value[0])(decoder.decode(value[1])),
    "$path": lambda _, value: pathlib.Path(value),
    "$namedtuple": Decoder._namedtuple,
    "$dataclass": Decoder._dataclass,
}
