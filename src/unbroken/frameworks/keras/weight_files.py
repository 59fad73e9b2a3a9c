"""Where Keras itself would put each variable of a model in a `.weights.h5` file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.saving.saving_lib import _walk_saveable

from unbroken.frameworks.keras.structure import snake_case, unique
from unbroken.state.handlers import Setting

# In the state of a model: where each variable, in the order of their names, stands in a file of weights.
FILE = "(file)"
_OPTIMIZER = "optimizer"


def paths_in_file(model: Any) -> dict[int, list[str]]:
    """Return where each variable stands in a file of weights, `layers/dense_1/vars/0`, by its identity.

    One that several layers have stands there for each of them. Those of the optimizer are left out, and
    states of seed generators are in no such file.
    """
    found: dict[int, list[str]] = {}
    for owner, layer in _owners("", model, set()):
        store: dict[str, Any] = {}
        if isinstance(layer, keras.Layer):
            layer.save_own_variables(store)
        for key, value in store.items():
            # Some layers store what they have calculated: that has no variable.
            if isinstance(value, keras.Variable):
                found.setdefault(id(value), []).append("/".join(filter(None, (owner, "vars", key))))
    return found


class FileLayout:
    """The paths of variables, found anew only when a model has got others: the way to them takes a while."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[tuple[int, ...], list[str | list[str]]]] = {}

    def of(self, model: Any, variables: list[Any]) -> list[str | list[str]]:
        """Return the path of each of the `variables` of `model`, empty for those that no file has.

        It is a list of paths for one that several layers have.
        """
        identities = tuple(map(id, variables))
        known = self._known.get(id(model))
        if known is None or known[0] != identities:
            paths = paths_in_file(model)
            known = self._known[id(model)] = (
                identities,
                [_stored(paths.get(one, [""])) for one in identities],
            )
        return known[1]


def layout_setting(mine: list[str | list[str]], saved: list[str | list[str]], place: str) -> list[Setting]:
    """Return a line if another version of Keras lays files of weights out otherwise."""
    if mine == saved:
        return []
    note = "files of weights: this version of Keras lays them out otherwise, which changes nothing here"
    return [Setting("file", None, None, note=note, places=(place,))]


def _stored(paths: list[str]) -> str | list[str]:
    return paths[0] if len(paths) == 1 else paths


def _owners(path: str, value: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield what Keras saves, in its order, each once and with its path."""
    if id(value) in seen:
        return
    seen.add(id(value))
    yield path, value
    for attribute, child in _walk_saveable(value):
        if path or attribute != _OPTIMIZER:
            yield from _inside(f"{path}/{attribute}" if path else attribute, child, seen, named=True)


def _inside(path: str, value: Any, seen: set[int], *, named: bool) -> Iterator[tuple[str, Any]]:
    if isinstance(value, KerasSaveable):
        yield from _owners(path, value, seen)
    elif isinstance(value, list | tuple | dict):
        if id(value) in seen:
            return
        seen.add(id(value))
        taken: set[str] = set()
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, KerasSaveable):
                yield from _owners(f"{path}/{unique(snake_case(item), taken)}", item, seen)
            elif isinstance(item, list | tuple | dict):
                yield from _inside(f"{path}/{unique('container', taken)}", item, seen, named=False)
