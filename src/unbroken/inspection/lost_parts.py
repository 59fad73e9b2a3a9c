"""What one checkpoint has as a whole and another has not: the optimizer's moments before all else."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from unbroken.inspection import roles
from unbroken.inspection.foreign import ROOT, part_of
from unbroken.inspection.formats.base import CheckpointReader


@dataclass(frozen=True, slots=True, kw_only=True)
class LostPart:
    """A part, or the moments of an optimizer, that is in `present` ("A" or "B") and not in the other.

    `where` is the path of what is lost, inside of `part` or the same. `is_whole` is False if only the
    moments are gone; `moments` are the names of those.
    """

    part: str
    where: str
    present: str
    is_whole: bool
    moments: tuple[str, ...] = ()
    text: str

    def covers(self, path: str) -> bool:
        """Tell whether what stands at `path` is a part of what is lost."""
        return path == self.where or path.startswith(f"{self.where}/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The paths of all tensors of a checkpoint, and of those that the other has not."""

    all: Collection[str]
    alone: Collection[str]


def lost_parts(a: CheckpointReader, b: CheckpointReader, names_a: Names, names_b: Names) -> list[LostPart]:
    """Return what is missing as a whole, optimizers first."""
    found = [*_one_way(a, b, names_a, ("A", "B")), *_one_way(b, a, names_b, ("B", "A"))]
    return sorted(found, key=lambda lost: (not lost.moments, lost.present))


def _one_way(
    here: CheckpointReader,
    there: CheckpointReader,
    names: Names,
    sides: tuple[str, str],
) -> list[LostPart]:
    found = _lost_moments(here, there, names, sides)
    told = {lost.where for lost in found}
    tensors = _by_part(names)
    for part in dict.fromkeys((*tensors, *_top(here.values))):
        missing, count = tensors.get(part, (0, 0))
        if part == ROOT or part in told or missing < count or part in _top(there.values):
            continue
        # A format that holds tensors only is no reason to miss what has none.
        if not count and not (there.values and isinstance(_top(here.values).get(part), dict)):
            continue
        words = f": {count} tensors" if count else ""
        text = f"{part} is in {sides[0]} and not in {sides[1]}{words}"
        found.append(LostPart(part=part, where=part, present=sides[0], is_whole=True, text=text))
    return found


def _by_part(names: Names) -> dict[str, tuple[int, int]]:
    """Return for each part how many of its tensors the other has not, and how many there are."""
    found: dict[str, tuple[int, int]] = {}
    for path in names.all:
        missing, count = found.get(part_of(path), (0, 0))
        found[part_of(path)] = (missing + (path in names.alone), count + 1)
    return found


def _is_kept(where: str, names: Names) -> bool:
    """Tell whether the tensors of an optimizer are in the other, too, if it has any."""
    begin = f"{where}/" if where else ""
    return any(path.startswith(begin) for path in names.all) and not any(
        path.startswith(begin) for path in names.alone
    )


def _lost_moments(
    here: CheckpointReader,
    there: CheckpointReader,
    names: Names,
    sides: tuple[str, str],
) -> list[LostPart]:
    found = []
    others = {other["where"]: other for other in roles.optimizers(there.values)}
    mine = {optimizer["where"]: optimizer for optimizer in roles.optimizers(here.values)}
    partners = roles.paired(mine, others)
    for where, optimizer in mine.items():
        states, other = optimizer["states"], others.get(partners.get(where, ""))
        # In a format that holds tensors only, an optimizer is its tensors.
        is_kept = other is None and _is_kept(where, names)
        if not states or is_kept or (other is not None and other["states"] >= states):
            continue
        kept = ", ".join(optimizer["moments"])
        if other is None:
            words = f"is in {sides[0]} and not in {sides[1]}: moments lost ({kept} of {states} parameters)"
        else:
            words = f"has moments ({kept}) of {states} parameters in {sides[0]}"
            words += f" and of {other['states']} in {sides[1]}: moments lost"
        text = f"optimizer state ({where or 'top'}) {words}"
        found.append(
            LostPart(
                part=where.partition("/")[0],
                where=where,
                present=sides[0],
                is_whole=other is None,
                moments=tuple(optimizer["moments"]),
                text=text,
            )
        )
    return found


def _top(values: Any) -> Mapping[str, Any]:
    return values if isinstance(values, dict) else {}
