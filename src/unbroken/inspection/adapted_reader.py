"""A checkpoint as it is to be written: under other names, and with its numbers as those of another dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain

from unbroken.checkpoint.verify import Finding
from unbroken.errors import UsageError
from unbroken.inspection.formats.base import CheckpointReader, StoredTensor, tensor_bytes
from unbroken.state.references import with_references
from unbroken.state.renaming import idle_segments, renaming

# Between the segments of a path are slashes, and dots in what a state_dict calls a tensor.
_BOUNDARIES = "./"
_MOST_NAMED = 5


class AdaptedReader(CheckpointReader):
    """A reader that reads through another one. Nothing is read until it is asked for.

    `renamed` are the paths that became others, `cast` gives for each tensor that is cast its dtype before.
    `overflowed` counts, for each tensor that has been read, the finite numbers that became infinite.

    Raises UsageError for a rule in `rename` that fits no name, and for two names that become one.
    """

    def __init__(self, reader: CheckpointReader, rename: Mapping[str, str], dtype: str | None) -> None:
        self._reader = reader
        self._dtype = dtype
        self.format, self.path, self.files = reader.format, reader.path, reader.files
        self.size_bytes, self.checksums, self.needs = reader.size_bytes, reader.checksums, reader.needs
        self.facts, self.problems, self.notes = reader.facts, reader.problems, reader.notes
        names = _new_names(reader, rename) if rename else {}
        self.renamed = {old: new for old, new in names.items() if old != new}
        self._origins = {names.get(path, path): path for path in reader.tensors}
        self.cast = {
            path: reader.tensors[origin].dtype
            for path, origin in self._origins.items()
            if dtype is not None and _is_cast(reader.tensors[origin].dtype, dtype)
        }
        self.tensors = {
            path: self._adapted(path, reader.tensors[origin]) for path, origin in self._origins.items()
        }
        self.values = with_references(reader.values, self.renamed) if self.renamed else reader.values
        self.overflowed: dict[str, int] = {}

    def read(self, path: str) -> memoryview:
        """Return the bytes of a tensor, cast where it is to be. Raises DamagedError."""
        data = self._reader.read(self._origins[path])
        if self._dtype is None or path not in self.cast:
            return data
        from unbroken.inspection.casting import cast

        done, overflowed = cast(data, self.cast[path], self._dtype)
        if overflowed:
            self.overflowed[path] = overflowed
        return memoryview(done)

    def verify(self) -> Iterator[Finding]:
        """Read everything of the checkpoint below, and yield what is damaged beyond `problems`."""
        yield from self._reader.verify()

    def losses(self) -> Iterator[str]:
        """Yield a line for each tensor in which numbers became infinite."""
        for path, count in self.overflowed.items():
            yield f"tensor {path}: {count} finite numbers of {self.cast[path]} are infinite as {self._dtype}"

    def _adapted(self, path: str, entry: StoredTensor) -> StoredTensor:
        aliases = tuple(self.renamed.get(alias, alias) for alias in entry.aliases)
        if self._dtype is None or path not in self.cast:
            return replace(entry, aliases=aliases) if aliases != entry.aliases else entry
        size = tensor_bytes(self._dtype, entry.shape)
        assert size is not None, entry
        return replace(entry, dtype=self._dtype, size_bytes=size, aliases=aliases, digest=None)


def _is_cast(dtype: str, target: str) -> bool:
    from unbroken.inspection.casting import CASTABLE

    return dtype in CASTABLE and dtype != target


def _new_names(reader: CheckpointReader, rename: Mapping[str, str]) -> dict[str, str]:
    """Return what each path of a tensor becomes, further ones included."""
    paths = [*reader.tensors, *chain.from_iterable(entry.aliases for entry in reader.tensors.values())]
    idle = idle_segments(rename, paths, boundaries=_BOUNDARIES)
    if idle:
        raise UsageError(
            f"{reader.path}: expected a map of names in it, found {_listed(idle)}, which fits none",
            hint="`unbroken inspect --tensors` lists the names; a rule is a name or its first segments",
        )
    new_name = renaming(rename, boundaries=_BOUNDARIES)
    names = {path: new_name(path) for path in paths}
    counts = Counter(names.values())
    doubled = [new for new, count in counts.items() if count > 1]
    if doubled or "" in counts:
        which = _listed(doubled) if doubled else "nothing"
        olds = _listed([old for old, new in names.items() if new in (doubled or [""])])
        raise UsageError(
            f"{reader.path}: expected a map that keeps tensors apart, found that {olds} become {which}",
            hint="map each name to one of its own",
        )
    return names


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(map(repr, names[:_MOST_NAMED])) + more
