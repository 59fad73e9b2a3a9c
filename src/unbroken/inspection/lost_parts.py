"""What one checkpoint has as a whole and another has not: the optimizer's moments before all else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unbroken.inspection import roles
from unbroken.inspection.foreign import ROOT
from unbroken.inspection.formats.base import CheckpointReader


@dataclass(frozen=True, slots=True, kw_only=True)
class LostPart:
    """A part, or the moments of an optimizer, that is in `present` ("A" or "B") and not in the other.

    `is_whole` is False if only the moments of the part are gone; `moments` are the names of those.
    """

    part: str
    present: str
    is_whole: bool
    moments: tuple[str, ...] = ()
    text: str


def lost_parts(
    a: CheckpointReader,
    b: CheckpointReader,
    tensors_a: Mapping[str, tuple[int, int]],
    tensors_b: Mapping[str, tuple[int, int]],
) -> list[LostPart]:
    """Return what is missing as a whole, optimizers first.

    `tensors_a` and `tensors_b` say for each part how many of its tensors the other has not, and how many
    it has.
    """
    found = [*_one_way(a, b, tensors_a, ("A", "B")), *_one_way(b, a, tensors_b, ("B", "A"))]
    return sorted(found, key=lambda lost: (not lost.moments, lost.present))


def _one_way(
    here: CheckpointReader,
    there: CheckpointReader,
    tensors: Mapping[str, tuple[int, int]],
    sides: tuple[str, str],
) -> list[LostPart]:
    found = _lost_moments(here, there, tensors, sides)
    told = {lost.part for lost in found}
    for part in dict.fromkeys((*tensors, *_top(here.values))):
        missing, count = tensors.get(part, (0, 0))
        if part == ROOT or part in told or missing < count or part in _top(there.values):
            continue
        # A format that holds tensors only is no reason to miss what has none.
        if not count and not (there.values and isinstance(_top(here.values).get(part), dict)):
            continue
        words = f": {count} tensors" if count else ""
        text = f"{part} is in {sides[0]} and not in {sides[1]}{words}"
        found.append(LostPart(part=part, present=sides[0], is_whole=True, text=text))
    return found


def _lost_moments(
    here: CheckpointReader,
    there: CheckpointReader,
    tensors: Mapping[str, tuple[int, int]],
    sides: tuple[str, str],
) -> list[LostPart]:
    found = []
    others = {other["where"]: other for other in roles.optimizers(there.values)}
    mine = {optimizer["where"]: optimizer for optimizer in roles.optimizers(here.values)}
    partners = roles.paired(mine, others)
    for where, optimizer in mine.items():
        states, other = optimizer["states"], others.get(partners.get(where, ""))
        part = where.partition("/")[0]
        # In a format that holds tensors only, an optimizer is its tensors.
        is_kept = other is None and tensors.get(part, (1, 1))[0] == 0
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
                part=part,
                present=sides[0],
                is_whole=other is None,
                moments=tuple(optimizer["moments"]),
                text=text,
            )
        )
    return found


def _top(values: Any) -> Mapping[str, Any]:
    return values if isinstance(values, dict) else {}
