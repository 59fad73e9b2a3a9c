"""Which names of tensors went with a prefix, and which tensor may be which other under a new name."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

# Dtype and shape: only tensors that agree in it can be the same one.
Kind: TypeAlias = tuple[str, tuple[int, ...]]
_BOUNDARY = re.compile(r"[./]")
# Of a suffix that so many names share, such as "weight", nothing follows.
_MOST_CANDIDATES = 16
# Names that no program gave could take for ever.
_MOST_SUFFIXES = 32
_LONGEST_NAME = 4096
# Each round looks at all suffixes of all names that are left.
_MOST_LOOKS = 1_000_000
_FEWEST_ROUNDS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Renaming:
    """Tensors of A that are in B under another name: `before` of their names became `after`.

    Where the names have nothing in common, `before` and `after` are whole names.
    """

    before: str
    after: str
    pairs: dict[str, str]


def find_renamings(missing: Mapping[str, Kind], extra: Mapping[str, Kind]) -> list[Renaming]:
    """Return how names in `missing` may have become names in `extra`, what explains most first."""
    left, free = dict(missing), dict(extra)
    found: list[Renaming] = []
    looks = 1 + sum(min(_MOST_SUFFIXES, 1 + len(_BOUNDARY.findall(name))) for name in (*missing, *extra))
    for _ in range(max(_FEWEST_ROUNDS, _MOST_LOOKS // looks)):
        renaming = _most_common_prefix(left, free)
        if renaming is None:
            break
        found.append(renaming)
        for before, after in renaming.pairs.items():
            del left[before], free[after]
    return found + _only_ones(left, free)


def _most_common_prefix(missing: Mapping[str, Kind], extra: Mapping[str, Kind]) -> Renaming | None:
    by_suffix: dict[tuple[str, Kind], list[str]] = defaultdict(list)
    for name, kind in extra.items():
        for suffix in _suffixes(name):
            by_suffix[suffix, kind].append(name)
    votes: Counter[tuple[str, str]] = Counter()
    for name, kind in missing.items():
        for suffix in _suffixes(name):
            candidates = by_suffix.get((suffix, kind), [])
            if candidates:
                for candidate in candidates if len(candidates) <= _MOST_CANDIDATES else ():
                    votes[name.removesuffix(suffix), candidate.removesuffix(suffix)] += 1
                break
    if not votes:
        return None
    # Of equally many, the shortest change, and then always the same one.
    (before, after), _ = min(
        votes.items(), key=lambda item: (-item[1], len(item[0][0] + item[0][1]), item[0])
    )
    pairs = {
        name: after + name.removeprefix(before)
        for name in missing
        # Also where the dtype or shape became another: the name says enough.
        if name.startswith(before) and after + name.removeprefix(before) in extra
    }
    return Renaming(before=before, after=after, pairs=pairs)


def _suffixes(name: str) -> Iterator[str]:
    """Yield what is left of a name without its first components, the longest first."""
    if len(name) > _LONGEST_NAME:
        return
    yield name
    for boundary in islice(_BOUNDARY.finditer(name), _MOST_SUFFIXES - 1):
        yield name[boundary.end() :]


def _only_ones(missing: Mapping[str, Kind], extra: Mapping[str, Kind]) -> list[Renaming]:
    """Return the pairs that are the only ones of their dtype and shape on both sides."""
    of_kind: dict[Kind, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for side, names in enumerate((missing, extra)):
        for name, kind in names.items():
            of_kind[kind][side].append(name)
    return [
        Renaming(before=before[0], after=after[0], pairs={before[0]: after[0]})
        for before, after in of_kind.values()
        if len(before) == len(after) == 1
    ]
