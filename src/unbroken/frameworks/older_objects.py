"""Which loaders were there at some moment: one that was not is built by what the script does after it."""

from __future__ import annotations

import gc
import weakref


class OlderObjects:
    """The iterable objects that exist now, without keeping any of them alive.

    Costs one look at every object of the process, some ten milliseconds. Containers of Python itself, of
    which no reference without ownership can be had, are not noted.
    """

    def __init__(self) -> None:
        is_noted: dict[type, bool] = {}
        noted: list[weakref.ref[object]] = []
        for found in gc.get_objects():
            cls = type(found)
            if cls not in is_noted:
                is_noted[cls] = hasattr(cls, "__iter__") and not issubclass(cls, type) and _has_weakref(cls)
            if is_noted[cls]:
                noted.append(weakref.ref(found))
        self._noted = {id(found): ref for ref in noted if (found := ref()) is not None}

    def lack(self, value: object) -> bool:
        """Tell whether `value` could have been noted and was not: it is younger."""
        if not (hasattr(type(value), "__iter__") and _has_weakref(type(value))):
            return False
        ref = self._noted.get(id(value))
        # The id of an object that is gone may be given to another; then the reference leads nowhere.
        return ref is None or ref() is not value


def _has_weakref(cls: type) -> bool:
    return cls.__module__ != "builtins" and cls.__weakrefoffset__ > 0
