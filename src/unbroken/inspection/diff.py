"""What is different between two checkpoints, of whatever formats: what matters most first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from unbroken.errors import DamagedError
from unbroken.inspection import roles
from unbroken.inspection.closeness import Closeness, closeness, same_bytes
from unbroken.inspection.formats.base import CheckpointReader, StoredTensor
from unbroken.inspection.formats.plain import join
from unbroken.inspection.lost_parts import LostPart, Names, lost_parts
from unbroken.inspection.renames import Renaming, find_renamings

_FACTS = ("step", "position", "metrics", "config", "environment", "choices", "metadata")
_ABSENT = "(absent)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedTensor:
    """A tensor that is in both. `closeness` is None if their shapes differ."""

    path: str
    path_in_b: str
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    closeness: Closeness | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedValue:
    """A value at a path; `a` or `b` is "(absent)" where the other has it alone."""

    path: str
    a: Any
    b: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is damaged or missing in the checkpoint `side`, "A" or "B": what it held is not compared."""

    side: str
    file: str
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """All that differs. `equal_tensors` counts those that are the same to the last bit.

    With `problems` nobody can tell whether that is all.
    """

    lost: list[LostPart] = field(default_factory=list)
    only_in_a: dict[str, StoredTensor] = field(default_factory=dict)
    only_in_b: dict[str, StoredTensor] = field(default_factory=dict)
    renamed: list[Renaming] = field(default_factory=list)
    changed: list[ChangedTensor] = field(default_factory=list)
    ties: list[ChangedValue] = field(default_factory=list)
    values: list[ChangedValue] = field(default_factory=list)
    facts: list[ChangedValue] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    equal_tensors: int = 0

    @property
    def is_empty(self) -> bool:
        """Tell whether nothing differs in what is there."""
        return not any(
            (
                self.lost,
                self.only_in_a,
                self.only_in_b,
                self.renamed,
                self.changed,
                self.ties,
                self.values,
                self.facts,
            )
        )

    def as_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {"equal": self.is_empty and not self.problems, **asdict(self)}


def compare(a: CheckpointReader, b: CheckpointReader) -> Difference:
    """Return what differs between two checkpoints. Tensors are read two at a time. Raises DamagedError.

    What the headers tell of damage is listed in `problems` instead, and all else is compared.
    """
    names = _names(a), _names(b)
    renamed = _renamed(a, b, names)
    name_in_b = {path: path for path in names[0] if path in names[1]}
    for renaming in renamed:
        name_in_b.update(renaming.pairs)
    pairs = {(names[0][one], names[1][other]): (one, other) for one, other in name_in_b.items()}
    changed, unread = [], []
    for keys, paths in pairs.items():
        try:
            found = _compare_tensors(a, b, keys, paths)
        except DamagedError:
            # Told below, with all else that is damaged; what no header tells of ends the comparison.
            if not a.problems and not b.problems:
                raise
            unread.append(paths[0])
            continue
        changed += [found] if found is not None else []
    found_in_b = set(name_in_b.values())
    only_in_a = {path: a.tensors[key] for path, key in names[0].items() if path not in name_in_b}
    only_in_b = {path: b.tensors[key] for path, key in names[1].items() if path not in found_in_b}
    lost = lost_parts(a, b, Names(all=names[0], alone=only_in_a), Names(all=names[1], alone=only_in_b))
    values, notes = _values(a, b, [part for part in lost if part.is_whole])
    if unread:
        notes.append(f"{len(unread)} tensors could not be compared, {unread[0]} first")
    return Difference(
        lost=lost,
        only_in_a=only_in_a,
        only_in_b=only_in_b,
        renamed=renamed,
        changed=sorted(changed, key=_importance),
        ties=_ties(names, name_in_b),
        values=values,
        facts=_facts(a, b, notes),
        notes=notes,
        problems=[
            Problem(side=side, file=found.file, problem=found.problem)
            for side, reader in (("A", a), ("B", b))
            for found in reader.problems
        ],
        equal_tensors=len(pairs) - len(changed) - len(unread),
    )


def _renamed(
    a: CheckpointReader, b: CheckpointReader, names: tuple[Mapping[str, str], Mapping[str, str]]
) -> list[Renaming]:
    missing = {path: _kind(a, key) for path, key in names[0].items() if path not in names[1]}
    extra = {path: _kind(b, key) for path, key in names[1].items() if path not in names[0]}
    known = _numbered(a, b, missing, extra)
    for renaming in known:
        for before, after in renaming.pairs.items():
            del missing[before], extra[after]
    return known + find_renamings(missing, extra)


def _numbered(
    a: CheckpointReader, b: CheckpointReader, missing: Mapping[str, Any], extra: Mapping[str, Any]
) -> list[Renaming]:
    """Return the states of optimizers that one keeps by the name of a parameter, and one by its number."""
    keys = roles.parameter_keys(a.values), roles.parameter_keys(b.values)
    left, free = dict(missing), dict(extra)
    found = []
    for one, other in roles.paired(*keys).items():
        count = len(keys[0][one])
        # A parameter that stands there twice is of no sound optimizer.
        if not count == len(keys[1][other]) == len({*keys[0][one]}) == len({*keys[1][other]}):
            continue
        places = {
            join(one, f"state/{before}"): join(other, f"state/{after}")
            for before, after in zip(keys[0][one], keys[1][other], strict=True)
        }
        split = {path: path.rpartition("/") for path in left}
        moved = {
            path: join(places[place], name) for path, (place, _, name) in split.items() if place in places
        }
        pairs = {path: after for path, after in moved.items() if after in free}
        for path, after in pairs.items():
            del left[path], free[after]
        if pairs:
            before, after = join(one, "state/(parameter)/"), join(other, "state/(parameter)/")
            found.append(Renaming(before=before, after=f"{after}, by order", pairs=pairs))
    return found


def _names(reader: CheckpointReader) -> dict[str, str]:
    """Return every path of every tensor, aliases too, with the path that the tensor is kept under."""
    return {place: path for path, entry in reader.tensors.items() for place in (path, *entry.aliases)}


def _kind(reader: CheckpointReader, path: str) -> tuple[str, tuple[int, ...]]:
    return reader.tensors[path].dtype, reader.tensors[path].shape


def _compare_tensors(
    a: CheckpointReader, b: CheckpointReader, keys: tuple[str, str], paths: tuple[str, str]
) -> ChangedTensor | None:
    one, other = a.tensors[keys[0]], b.tensors[keys[1]]
    is_alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    # A digest tells of a file that is there.
    is_whole = not a.problems and not b.problems
    if is_whole and is_alike and one.digest is not None and one.digest == other.digest:
        return None
    found = None
    if one.shape == other.shape:
        first, second = a.read(keys[0]), b.read(keys[1])
        if is_alike and same_bytes(first, second):
            return None
        found = closeness((one.dtype, other.dtype), first, second)
    return ChangedTensor(
        path=paths[0],
        path_in_b=paths[1],
        dtypes=(one.dtype, other.dtype),
        shapes=(one.shape, other.shape),
        closeness=found,
    )


def _importance(changed: ChangedTensor) -> tuple[Any, ...]:
    """Other shapes first, then other dtypes, NaN in one of them, and then by distance."""
    found = changed.closeness
    if found is None:
        return (0, 0, 0, changed.path)
    distance = -1.0 if found.largest is None else float(found.largest)
    return (
        1 + (changed.dtypes[0] == changed.dtypes[1]),
        found.nans[0] == found.nans[1],
        -distance,
        changed.path,
    )


def _ties(
    names: tuple[Mapping[str, str], Mapping[str, str]], name_in_b: Mapping[str, str]
) -> list[ChangedValue]:
    """Return the tensors that are tied to others in one of the two only."""
    group: list[dict[str, list[str]]] = [{}, {}]
    for one, other in name_in_b.items():
        group[0].setdefault(names[0][one], []).append(one)
        group[1].setdefault(names[1][other], []).append(one)
    tied = [{tuple(sorted(paths)) for paths in groups.values() if len(paths) > 1} for groups in group]
    return [
        ChangedValue(
            path=paths[0],
            a=list(paths) if paths in tied[0] else "",
            b=list(paths) if paths in tied[1] else "",
        )
        for paths in sorted(tied[0] ^ tied[1])
    ]


def _values(
    a: CheckpointReader, b: CheckpointReader, lost: Sequence[LostPart]
) -> tuple[list[ChangedValue], list[str]]:
    """Return the values that differ, but for those of parts that are lost as a whole."""
    if bool(a.values) != bool(b.values):
        side, reader = ("B", b) if a.values else ("A", a)
        return [], [f"{side} ({reader.format}) holds tensors only; values of the other are not listed"]
    found = _changed(dict(flatten(a.values)), dict(flatten(b.values)))
    return [item for item in found if not any(part.covers(item.path) for part in lost)], []


def _facts(a: CheckpointReader, b: CheckpointReader, notes: list[str]) -> list[ChangedValue]:
    known = [{key: reader.facts[key] for key in _FACTS if key in reader.facts} for reader in (a, b)]
    shared = [key for key in _FACTS if key in known[0] and key in known[1]]
    alone = [key for key in _FACTS if (key in known[0]) != (key in known[1])]
    attributes = [reader.facts.get("attributes", {}) for reader in (a, b)]
    if "attributes" in a.facts and "attributes" in b.facts and attributes[0] != attributes[1]:
        notes.append("what hangs on dictionaries beside their items (versions of modules) is not the same")
    if alone:
        side = "A" if alone[0] in known[0] else "B"
        notes.append(f"only {side} says anything about: {', '.join(alone)}")
    return [
        item
        for key in shared
        for item in _changed(dict(flatten(known[0][key], key)), dict(flatten(known[1][key], key)))
    ]


def _changed(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[ChangedValue]:
    return [
        ChangedValue(path=path, a=first.get(path, _ABSENT), b=second.get(path, _ABSENT))
        for path in dict.fromkeys((*first, *second))
        if path not in first or path not in second or not _is_same(first[path], second[path])
    ]


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the single values in nested ones by their paths; tensors are none, short lists are one."""
    if isinstance(value, dict) and value:
        inner = {key: item for key, item in value.items() if key != "$tensor"}
        for key, item in inner.items():
            yield from flatten(item, f"{path}/{key}" if path else key)
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for index, item in enumerate(value):
            yield from flatten(item, f"{path}/{index}" if path else str(index))
    else:
        yield path, value


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_is_same, first, second))
    if isinstance(first, float) and isinstance(second, float) and math.isnan(first):
        return math.isnan(second)
    return isinstance(first, bool) == isinstance(second, bool) and bool(first == second)
