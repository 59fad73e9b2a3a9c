"""Loaded values into live containers, in place; and which keys a script gave them that a checkpoint lacks."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import zip_longest
from typing import Any, TypeAlias

from unbroken.state.handlers import Difference, Setting
from unbroken.state.table import TensorTable
from unbroken.state.tensors import TensorSource, copy_bytes
from unbroken.state.tree import Encoder, FillsOnly, LeafCodec, join

# Keys from the outermost mapping to one inside.
Place: TypeAlias = tuple[object, ...]
IsElsewhere: TypeAlias = Callable[[object], bool]

# Stands in a state for an object that is kept elsewhere: a restore leaves the live one where it is.
_ELSEWHERE = {"(kept elsewhere)": True}
# Where the search for such objects does not go, they are not left out, and so are refused.
_LONGEST = 10_000
_DEEPEST = 100


def nowhere(value: object) -> bool:
    """Tell of no object that it is kept elsewhere."""
    return False


class Marking:
    """Puts a mark in the place of objects that are kept elsewhere; what holds none stays as it is."""

    def __init__(self, is_elsewhere: IsElsewhere) -> None:
        self._is_elsewhere = is_elsewhere
        self._open: list[int] = []

    def of(self, value: Any) -> Any:
        """Return `value`, or a copy with marks in it."""
        if self._is_elsewhere(value):
            return dict(_ELSEWHERE)
        is_dataclass = dataclasses.is_dataclass(value) and not isinstance(value, type)
        if not (is_dataclass or (isinstance(value, dict | list | tuple) and len(value) <= _LONGEST)):
            return value
        if id(value) in self._open or len(self._open) > _DEEPEST:
            # Refused by the encoder, which says where.
            return value
        self._open.append(id(value))
        try:
            return self._fields(value) if is_dataclass else self._items(value)
        finally:
            self._open.pop()

    def _items(self, value: Any) -> Any:
        if isinstance(value, dict):
            marked = {key: self.of(item) for key, item in value.items()}
            if all(marked[key] is item for key, item in value.items()):
                return value
            # A copy knows its kind, and its factory.
            copied = copy.copy(value)
            copied.update(marked)
            return copied
        items = [self.of(item) for item in value]
        is_same = all(one is other for one, other in zip(items, value, strict=True))
        return value if is_same else _like(value, items)

    def _fields(self, value: Any) -> Any:
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        marked = {name: self.of(item) for name, item in fields.items()}
        if all(marked[name] is item for name, item in fields.items()):
            return value
        copied = copy.copy(value)
        for name, item in marked.items():
            object.__setattr__(copied, name, item)
        return copied


class ScriptKeys:
    """The keys that objects had when their state was first asked for: those that the script gives them.

    A key that is gone since was removed by training, and is gone after a restore, too. One that a
    checkpoint lacks and that was never removed is new in the script, and stays.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[object, set[Place]]] = {}

    def removed(self, owner: object, content: Mapping[Any, Any]) -> list[list[object]]:
        """Return the places of keys that are gone from `content`, what `owner` consists of."""
        gone = (place for place in self._of(owner, content) if _is_gone(place, content))
        return [list(place) for place in sorted(gone, key=repr)]

    def kept(
        self, owner: object, content: Mapping[Any, Any], removed: Iterable[Sequence[object]]
    ) -> set[Place]:
        """Return the places of keys that stay, whether or not a checkpoint with `removed` ones has them."""
        return self._of(owner, content) - {tuple(place) for place in removed}

    def note_removed(
        self, owner: object, content: Mapping[Any, Any], removed: Iterable[Sequence[object]]
    ) -> None:
        """Take over what a checkpoint says is removed, for the next one to say it, too."""
        self._of(owner, content).update(tuple(place) for place in removed)

    def _of(self, owner: object, content: Mapping[Any, Any]) -> set[Place]:
        known = self._seen.get(id(owner))
        if known is None or known[0] is not owner:
            known = self._seen[id(owner)] = (owner, set(_places(content, ())))
        return known[1]


def new_in_script(
    live: Mapping[Any, Any],
    loaded: Mapping[Any, Any],
    kept: Container[Place],
    is_elsewhere: IsElsewhere,
    path: str = "",
    place: Place = (),
) -> Iterator[Setting]:
    """Yield a note for each key that only the script has, and for each mark that has no object here.

    `path` is that of the mapping `live` in the state, which is otherwise there then.
    """
    keys = [*live, *(key for key in loaded if key not in live)]
    # Mappings with other keys are encoded as a whole.
    has_names = type(live) is dict and all(isinstance(key, str) and not key.startswith("$") for key in keys)
    for key in keys:
        here, item = (*place, key), live.get(key)
        name = ".".join(map(str, here))
        inner = join(path, key).lstrip("/") if has_names else path
        if key not in loaded:
            if here in kept:
                shown = item if isinstance(item, bool | int | float | str | None) else type(item).__name__
                note = f"{name}: {shown!r} of the script is kept, the checkpoint lacks it"
                yield Setting(name, None, shown, note=note, places=(inner,))
        elif _is_mark(loaded[key]) and not is_elsewhere(item):
            note = f"{name}: no random generator is there any more"
            yield Setting(name, None, None, note=note, places=(inner,))
        elif isinstance(item, MutableMapping) and isinstance(loaded[key], dict):
            yield from new_in_script(item, loaded[key], kept, is_elsewhere, inner, here)


class Filling:
    """Puts loaded values into live containers and tensors in place, where they are of the same kind.

    Keys at the places `kept` stay where a loaded mapping lacks them.
    """

    def __init__(self, codecs: Sequence[LeafCodec], kept: Container[Place] = ()) -> None:
        self._codecs = codecs
        self._kept = kept
        self._filled: set[int] = set()

    def fill(self, live: Any, loaded: Any, place: Place | None = None) -> Any:
        """Return what belongs in the place of `live`: itself, filled, or `loaded`."""
        if _is_mark(loaded):
            return live
        if id(live) in self._filled:
            # One tensor in two places: it stays so only if both places hold the same.
            is_filled_only = any(isinstance(codec, FillsOnly) and codec.fills(live) for codec in self._codecs)
            return live if is_filled_only or self._is_equal(live, loaded) else loaded
        if any(codec.assign(live, loaded) for codec in self._codecs):
            self._filled.add(id(live))
            return live
        if isinstance(live, MutableMapping) and isinstance(loaded, dict):
            items = self.items(live, loaded, place)
            live.clear()
            live.update(items)
            return live
        if isinstance(live, list) and isinstance(loaded, list):
            live[:] = self._sequence(live, loaded)
            return live
        if isinstance(live, deque) and isinstance(loaded, deque) and live.maxlen == loaded.maxlen:
            live.clear()
            live.extend(loaded)
            return live
        if isinstance(live, set) and isinstance(loaded, set):
            live.clear()
            live.update(loaded)
            return live
        return self._inside(live, loaded)

    def items(
        self, live: Mapping[Any, Any], loaded: Mapping[Any, Any], place: Place | None
    ) -> dict[Any, Any]:
        """Return what belongs into the mapping `live`, which stands at `place`."""
        items = {
            key: self.fill(live.get(key), item, None if place is None else (*place, key))
            for key, item in loaded.items()
            if key in live or not _is_mark(item)
        }
        if place is not None:
            items |= {
                key: item for key, item in live.items() if key not in loaded and (*place, key) in self._kept
            }
        return items

    def _sequence(self, live: Sequence[Any], loaded: Sequence[Any]) -> list[Any]:
        room = len(loaded) - len(live)
        return [self.fill(old, new) for old, new in zip([*live, *[None] * room], loaded, strict=False)]

    def _inside(self, live: Any, loaded: Any) -> Any:
        """Return `loaded`, which is not filled in place, with what it holds filled where that can be."""
        if type(live) is not type(loaded):
            return loaded
        if isinstance(loaded, tuple):
            return _like(loaded, self._sequence(live, loaded))
        if dataclasses.is_dataclass(loaded):
            for field in dataclasses.fields(loaded):
                new = self.fill(getattr(live, field.name, None), getattr(loaded, field.name))
                object.__setattr__(loaded, field.name, new)
        return loaded

    def _is_equal(self, live: Any, loaded: Any) -> bool:
        tables = TensorTable(), TensorTable()
        encoded = [
            Encoder(table, self._codecs).encode(value, "value")
            for table, value in zip(tables, (live, loaded), strict=True)
        ]
        sources = [table.sources.get("value") for table in tables]
        return encoded[0] == encoded[1] and _bytes_of(sources[0]) == _bytes_of(sources[1])


class Misfits:
    """Finds what in live containers can be filled only, and not with what is loaded for it."""

    def __init__(self, codecs: Sequence[LeafCodec]) -> None:
        self._codecs = [codec for codec in codecs if isinstance(codec, FillsOnly)]
        self._loaded: dict[int, Any] = {}

    def of(self, live: Any, loaded: Any, name: str = "") -> Iterator[Difference]:
        """Yield a difference for each such place in `live`."""
        if not self._codecs or _is_mark(loaded):
            return
        reason = self._reason(live, loaded)
        if reason is not None:
            yield Difference("other", name, reason)
            return
        for key, (mine, theirs) in _paired(live, loaded).items():
            yield from self.of(mine, theirs, f"{name}.{key}" if name else str(key))

    def _reason(self, live: Any, loaded: Any) -> str | None:
        for codec in self._codecs:
            reason = codec.misfit(live, loaded)
            if reason is not None:
                return reason
            if codec.fills(live):
                first = self._loaded.setdefault(id(live), loaded)
                is_one = first is loaded or first.tobytes() == loaded.tobytes()
                return None if is_one else "it stands in two places here, which differ in the checkpoint"
        return None


def _paired(live: Any, loaded: Any) -> dict[Any, tuple[Any, Any]]:
    """Return what stands in the same places of two containers, None where one has nothing."""
    if isinstance(live, MutableMapping) and isinstance(loaded, dict):
        return {
            key: (live.get(key), loaded.get(key))
            for key in [*live, *(key for key in loaded if key not in live)]
        }
    if isinstance(live, list | tuple | deque) and isinstance(loaded, list | tuple | deque):
        return dict(enumerate(zip_longest(live, loaded)))
    if dataclasses.is_dataclass(loaded) and type(live) is type(loaded):
        names = [field.name for field in dataclasses.fields(loaded)]
        return {name: (getattr(live, name, None), getattr(loaded, name, None)) for name in names}
    return {}


def _like(value: Any, items: list[Any]) -> Any:
    make = getattr(type(value), "_make", None)
    if make is not None:
        return make(items)
    return items if isinstance(value, list) else tuple(items)


def _is_mark(value: object) -> bool:
    # Only then: arrays and tensors do not compare to yes or no.
    return type(value) is dict and value == _ELSEWHERE


def _places(content: Mapping[Any, Any], place: Place, around: Place = ()) -> Iterator[Place]:
    for key, item in content.items():
        here = (*place, key)
        yield here
        # One that contains itself is refused by the encoder, which says where.
        if isinstance(item, MutableMapping) and id(item) not in around:
            yield from _places(item, here, (*around, id(item)))


def _is_gone(place: Place, content: Mapping[Any, Any]) -> bool:
    """Tell whether the mapping that had the key at `place` is there without it."""
    inner: Any = content
    for key in place[:-1]:
        inner = inner.get(key) if isinstance(inner, Mapping) else None
    return isinstance(inner, Mapping) and place[-1] not in inner


def _bytes_of(source: TensorSource | None) -> tuple[object, ...] | None:
    return None if source is None else (source.dtype, source.shape, copy_bytes(source))
