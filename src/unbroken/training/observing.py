"""Arms a process for `unbroken drill --observe`: it is observed once it has imported torch itself.

Called by a `sitecustomize` that the drill puts on the path. Nothing but the standard library is imported
until then, for this runs in every Python process that the command starts.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

_LIBRARY = "torch"
_CUSTOM = "sitecustomize"


def arm(directory: str) -> None:
    """Observe this process from its import of torch on; the caller's file lies in `directory`."""
    if _LIBRARY in sys.modules:
        _begin()
    else:
        sys.meta_path.insert(0, _AfterImport(_LIBRARY, _begin))
    _go_on_behind(directory)


def _begin() -> None:
    from unbroken.training.observer import observe

    observe()


def _go_on_behind(directory: str) -> None:
    """Run the sitecustomize that ours stands before, if there is one."""
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != os.path.abspath(directory)]
    spec = importlib.machinery.PathFinder.find_spec(_CUSTOM, sys.path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules[_CUSTOM] = module
    spec.loader.exec_module(module)


class _AfterImport(MetaPathFinder):
    """Calls `then` once the module `name` is imported."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader)
        return spec

    def _follow(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # The loader is left as it was found: it stays with the module for ever.
            del loader.exec_module
            execute(module)
            self._then()

        loader.exec_module = exec_module
