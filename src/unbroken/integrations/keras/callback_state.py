"""What other callbacks have come to know in a fit: taken out, and put back into callbacks made anew.

A callback says nothing of its state, so that what its attributes are now and were not when it was given to
fit is taken for it. What has not moved is a setting, and the script's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import keras
import msgspec

from unbroken.errors import UnsupportedStateError
from unbroken.integrations.keras.csv_files import KEPT, cut_file, file_size, has_file
from unbroken.integrations.keras.live_values import is_variable, live_state, put_live
from unbroken.rundir.tell import tell
from unbroken.state.handlers import Difference
from unbroken.state.table import TensorTable
from unbroken.state.tensors import bytes_of
from unbroken.state.tree import Encoder
from unbroken.training import families

# Of every callback: what fit gives to it.
_OF_FIT = frozenset({"_model", "params"})
# The clock of one process means nothing in another.
_CLOCK = "_time"
# What callbacks compare a monitored value by, once they have found out; with it they turn a sign around.
_OPERATIONS = {"less": keras.ops.less, "greater": keras.ops.greater}
# The setting whose sign Keras turns when it has found out.
_LEAST = "min_delta"
# Whose callbacks are known: what they have that cannot be kept is made anew by each fit.
_OF_LIBRARIES = frozenset({"keras", "unbroken"})
# The name under which another order of the callbacks is refused.
ORDER = "the order of the callbacks"
# Longer settings are not compared: they are data.
_LONGEST_SETTING = 200


class KeptCallback:
    """One callback of a fit, with what it was when it was given to that."""

    def __init__(self, name: str, callback: Any) -> None:
        self.name = name
        self.callback = callback
        self._appends: bool | None = None
        self._told = set[str]()
        self._built = {} if self._has_own_state else copy.deepcopy(self._attributes())

    @property
    def _has_own_state(self) -> bool:
        methods = (getattr(self.callback, name, None) for name in ("state_dict", "load_state_dict"))
        return all(callable(method) for method in methods)

    def state(self) -> dict[str, Any]:
        """Return what it has come to know, and its settings."""
        if self._has_own_state:
            return {"own": self.callback.state_dict()}
        self.tell_of_unkept()
        now = self._attributes()
        moved = {
            key: value
            for key, value in now.items()
            if key not in self._built or not _is_same(value, self._built[key])
        }
        settings = {key: repr(value) for key, value in self._built.items()}
        return {
            "attributes": moved,
            "live": self._live(),
            "removed": sorted(self._built.keys() - vars(self.callback).keys()),
            "operations": self._operations(),
            "settings": {key: text for key, text in settings.items() if len(text) <= _LONGEST_SETTING},
            **({"file_bytes": file_size(self.callback)} if has_file(self.callback) else {}),
        }

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Do what has to be done before it begins in a fit that goes on."""
        if "file_bytes" in state and has_file(self.callback):
            # It would empty the file.
            self._appends, self.callback.append = self.callback.append, True

    def has_begun(self) -> None:
        """Undo what was done before it began: the script may give it to another fit."""
        if self._appends is not None:
            self._appends, self.callback.append = None, self._appends

    def cut_file(self, state: Mapping[str, Any]) -> None:
        """Drop what it has written to a file of its own behind the checkpoint."""
        if "file_bytes" in state and has_file(self.callback):
            cut_file(self.callback, state["file_bytes"])

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put what it had come to know into it; the rest is as it was built."""
        if self._has_own_state:
            self.callback.load_state_dict(state["own"])
            return
        here, now = vars(self.callback), self._attributes()
        # An open file, say, that has taken the place of None since stays: nothing else could make it.
        as_built = {key: value for key, value in self._built.items() if key in now or key not in here}
        wanted = {**copy.deepcopy(as_built), **state["attributes"]}
        for key in state["removed"]:
            wanted.pop(key, None)
        for key in now.keys() - wanted.keys():
            del here[key]
        here.update(wanted)
        here.update({key: self._built.get(key) for key in self._operations()})
        here.update({key: _OPERATIONS[name] for key, name in state["operations"].items()})
        if _LEAST in self._built and _LEAST in state["attributes"] and self._has_turned(state):
            here[_LEAST] = -self._built[_LEAST]
        for key, kept in state["live"].items():
            put_live(f"{self.name}.{key}", here.get(key), kept)

    def differences(self, state: Mapping[str, Any]) -> list[Difference]:
        """Return why a state does not fit."""
        if ("own" in state) == self._has_own_state:
            return []
        text = "it has a state_dict() here or in the checkpoint, not in both"
        return [Difference("other", self.name, text)]

    def changed_settings(self, state: Mapping[str, Any]) -> list[str]:
        """Return a line for each setting that the script has changed."""
        changed = {
            key: text
            for key, text in state.get("settings", {}).items()
            if key in self._built and repr(self._built[key]) != text
        }
        moved = {key for key in state.get("attributes", {}) if key != _LEAST or not self._has_turned(state)}
        return [
            f"{self.name}: {key}={self._built[key]!r} of the script is "
            + ("not used: the checkpoint says to what it came" if key in moved else "used")
            + f", the checkpoint has {text}"
            for key, text in changed.items()
        ]

    def tell_of_unkept(self) -> None:
        """Say once of each attribute that it is in no checkpoint and looks as if it had a state."""
        if self._has_own_state or _root(self.callback) in _OF_LIBRARIES:
            return
        lost = {
            key
            for key, value in vars(self.callback).items()
            if key not in _OF_FIT and not _is_silent(value) and not _is_kept(value)
        }
        for key in sorted(lost - self._told):
            kind = type(vars(self.callback)[key]).__name__
            tell(
                f"fit: {self.name}.{key}, a {kind}, cannot be kept: in a resume it is as the script makes it"
            )
        self._told |= lost

    def _has_turned(self, state: Mapping[str, Any]) -> bool:
        """Tell whether Keras has turned the sign of the setting that it turns for what should get less."""
        return bool(repr(-state["attributes"][_LEAST]) == state["settings"].get(_LEAST))

    def _live(self) -> dict[str, Any]:
        found = {key: live_state(value) for key, value in vars(self.callback).items() if key not in _OF_FIT}
        return {key: state for key, state in found.items() if state is not None}

    def _operations(self) -> dict[str, str]:
        return {
            key: name
            for key, value in vars(self.callback).items()
            for name, operation in _OPERATIONS.items()
            if value is operation
        }

    def _attributes(self) -> dict[str, Any]:
        here = {key: value for key, value in vars(self.callback).items() if key not in _OF_FIT}
        if has_file(self.callback):
            here = {key: value for key, value in here.items() if key in KEPT}
        elif _root(self.callback) == "keras":
            here = {key: value for key, value in here.items() if not key.endswith(_CLOCK)}
        return {key: value for key, value in here.items() if _encoded(value) is not None}


def kept_callbacks(callbacks: Sequence[Any], without: Sequence[type]) -> list[KeptCallback]:
    """Return the callbacks whose state is to be kept, named by their classes; `without` those of some."""
    found, seen = list[KeptCallback](), dict[str, int]()
    for callback in callbacks:
        if isinstance(callback, tuple(without)):
            continue
        name = type(callback).__qualname__
        seen[name] = seen.get(name, 0) + 1
        found.append(KeptCallback(name if seen[name] == 1 else f"{name}-{seen[name]}", callback))
    return found


def callback_differences(kept: Sequence[KeptCallback], states: Mapping[str, Any]) -> list[Difference]:
    """Return why the states in a checkpoint do not fit the callbacks of a fit."""
    names = {found.name for found in kept}
    found = [
        Difference("missing", name, "no such callback in the checkpoint") for name in names - states.keys()
    ]
    found += [Difference("unexpected", name, "fit has no such callback") for name in states.keys() - names]
    found += [item for one in kept if one.name in states for item in one.differences(states[one.name])]
    shared = [one.name for one in kept if one.name in states]
    saved = [name for name in states if name in names]
    if not found and shared != saved:
        text = f"{', '.join(shared)}, the checkpoint has them as {', '.join(saved)}"
        found.append(Difference("other", ORDER, text))
    return sorted(found, key=lambda item: item.name)


def progress_bar(callbacks: Sequence[Any]) -> Any:
    """Return the progress bar among the callbacks, or None."""
    return next((found for found in callbacks if isinstance(found, keras.callbacks.ProgbarLogger)), None)


def bar_state(bar: Any) -> dict[str, Any]:
    """Return what a progress bar shows."""
    if bar is None or bar.progbar is None:
        return {}
    shown = bar.progbar
    return {
        "seen": bar.seen,
        "values": {key: list(value) for key, value in shown._values.items()},
        "order": list(shown._values_order),
        "so_far": shown._seen_so_far,
    }


def restore_bar(bar: Any, state: Mapping[str, Any]) -> None:
    """Let a progress bar go on; the time that it shows is that of this process."""
    if bar is None or bar.progbar is None or not state:
        return
    shown = bar.progbar
    bar.seen = state["seen"]
    shown._values = {key: list(value) for key, value in state["values"].items()}
    shown._values_order = list(state["order"])
    shown._seen_so_far = state["so_far"]


def _encoded(value: object) -> tuple[bytes, TensorTable] | None:
    """Return a plain value as text, with its tensors; None for one that cannot be kept."""
    table = TensorTable()
    try:
        codecs = [_WithoutVariables(codec) for codec in families.codecs()]
        encoded = Encoder(table, codecs).encode(value, "callback")
    except UnsupportedStateError:
        return None
    return msgspec.json.encode(encoded, order="sorted"), table


class _WithoutVariables:
    """A codec for all but variables: what is loaded for one is no variable, and cannot take its place."""

    def __init__(self, codec: Any) -> None:
        self.root, self._codec = codec.root, codec

    def encode(self, value: object) -> Any:
        if is_variable(value):
            raise UnsupportedStateError(
                "callback: expected plain values, found a variable inside others",
                hint="make it an attribute of the callback",
            )
        return self._codec.encode(value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codec, name)


def _is_kept(value: object) -> bool:
    return _encoded(value) is not None or live_state(value) is not None


def _is_silent(value: object) -> bool:
    # What computes, and what is of the program: no state, or one that is kept elsewhere.
    return callable(value) or isinstance(value, ModuleType) or _root(value) == "unbroken"


def _root(value: object) -> str:
    return type(value).__module__.partition(".")[0]


def _is_same(one: object, other: object) -> bool:
    found, known = _encoded(one), _encoded(other)
    if found is None or known is None or found[0] != known[0]:
        return False
    pairs = zip(found[1].sources.values(), known[1].sources.values(), strict=True)
    return all(
        (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape) and bytes_of(mine) == bytes_of(theirs)
        for mine, theirs in pairs
    )
