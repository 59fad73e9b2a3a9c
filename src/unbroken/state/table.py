"""The tensors of a state, apart from the tree: one entry for each memory, with all its paths."""

from __future__ import annotations

from unbroken.state.tensors import TensorSource


class TensorTable:
    """The tensors met while encoding: one entry for each memory, with all the paths that lead to it."""

    def __init__(self) -> None:
        self.sources: dict[str, TensorSource] = {}
        # Only for those that have any.
        self.aliases: dict[str, list[str]] = {}
        # Parts all of whose tensors training makes, further tensors that training keeps finite, and those
        # that may be anything nevertheless.
        self.trained_parts: set[str] = set()
        self.sound: frozenset[str] = frozenset()
        self.exempt: set[str] = set()
        self._path_of: dict[object, str] = {}

    def add(self, path: str, source: TensorSource, *, keep_alias: bool = False) -> str:
        """Enter `source` and return the path it is kept under: with `keep_alias`, that of its first place."""
        # Keys 1 and "1" of one dictionary give the same path.
        while path in self.sources:
            path += "'"
        first = self._first_place(path, source) if keep_alias else path
        if first is path:
            self.sources[path] = source
        else:
            self.aliases.setdefault(first, []).append(path)
        return first

    def _first_place(self, path: str, source: TensorSource) -> str:
        """Return the path under which the memory of `source` was entered already, or else `path`."""
        address = source.address
        # The address alone tells nearly all apart, and is asked for in any case; an identity costs more.
        place = source.identity if address is None else address
        if place is None:
            return path
        first = self._path_of.setdefault(place, path)
        if first is path:
            return path
        identity = source.identity
        if identity is None:
            return path
        if identity == self.sources[first].identity:
            return first
        return self._path_of.setdefault(identity, path)
