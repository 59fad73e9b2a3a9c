"""Which of the suspects is the cause: the smallest set that, put back, makes the rest of the run right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from unbroken.drill.comparison import FOUND, GENERATORS, Difference, Pair

# Each costs a run of the script from the resume to its end.
_MOST_SINGLE_TRIALS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """Components that were not restored and belong together: a part, or an object that is in no part."""

    name: str
    components: Mapping[str, Pair]
    # Of an object in no part, such as "numpy.Generator"; of a number or a text its type.
    kind: str | None = None

    @property
    def is_in_no_part(self) -> bool:
        return self.name.startswith(FOUND)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The suspects that had to be put back, and how many runs it took to know."""

    suspects: tuple[Suspect, ...]
    trials: int


def suspects(at_began: Difference) -> tuple[Suspect, ...]:
    """Return what was not restored, the likeliest first: what is in no part, then parts, then generators."""
    grouped: dict[str, dict[str, Pair]] = {}
    for name, pair in at_began.components.items():
        grouped.setdefault(_owner(name), {})[name] = pair
    return tuple(Suspect(name=owner, components=components) for owner, components in grouped.items())


def prove(found: Sequence[Suspect], is_right_with: Callable[[Sequence[Suspect]], bool]) -> Proof | None:
    """Return a set that makes the rest of the run right and of which none can be left out, or None.

    `is_right_with` puts these back and runs the rest. Each is tried alone, then all together, and then
    all but some.
    """
    trials = 0

    def is_right(candidates: Sequence[Suspect]) -> bool:
        nonlocal trials
        trials += 1
        return is_right_with(candidates)

    for candidates in _first_trials(found):
        if is_right(candidates):
            # Those that were tried alone need not be tried again.
            least = 2 if len(found) <= _MOST_SINGLE_TRIALS else 1
            return Proof(suspects=tuple(_needed(candidates, is_right, least)), trials=trials)
    return None


def _needed(
    candidates: Sequence[Suspect], is_right: Callable[[Sequence[Suspect]], bool], least: int
) -> Sequence[Suspect]:
    """Leave out halves, then quarters, down to single ones, as long as the rest is still right."""
    needed, size = list(candidates), len(candidates) // 2
    while size:
        for start in reversed(range(0, len(needed), size)):
            rest = needed[:start] + needed[start + size :]
            if len(rest) >= least and is_right(rest):
                needed = rest
        size //= 2
    return needed


def _first_trials(found: Sequence[Suspect]) -> Iterator[Sequence[Suspect]]:
    if len(found) <= _MOST_SINGLE_TRIALS:
        yield from ([one] for one in found)
    if len(found) > 1:
        yield found


def _owner(name: str) -> str:
    # Objects of the script and generators stand for themselves, of a part all tensors go together.
    if name.startswith((FOUND, GENERATORS)):
        return name
    return name.partition("/")[0]
