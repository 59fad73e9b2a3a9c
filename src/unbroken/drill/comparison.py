"""What differs between two records, where first, and what was not as it should be when it began there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from unbroken.rundir.rehearsal import Line

# Objects in no part of the run.
FOUND = "found/"
GENERATORS = "rng/"
# The lines that a process has at the same places as the reference.
_COMPARED = ("step", "epoch")
Pair = tuple[str | None, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What differs between two lines; pairs are of the reference and of the other, None where absent.

    `components` come in the order of causes: what is in no part first, generators of the process last.
    """

    batch: bool = False
    metrics: Mapping[str, Pair] = field(default_factory=dict)
    gradients: bool = False
    components: Mapping[str, Pair] = field(default_factory=dict)
    rates: tuple[tuple[str, ...], tuple[str, ...]] | None = None

    @property
    def is_of_training(self) -> bool:
        """False if nothing differs but objects in no part: they have changed nothing else so far."""
        others = any(not name.startswith(FOUND) for name in self.components)
        return bool(self.batch or self.metrics or self.gradients or self.rates or others)


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first difference of a run from its reference.

    It shows at `step`, or as the epoch after it begins, in the process with that index, which went on from
    `began_at`: zero if it began anew. `at_began` is what differed there already, before its first step: what
    was not restored.
    `batch_of` is the step of the reference that had that very batch.
    """

    process: int
    began_at: int
    is_resumed: bool
    step: int
    is_between_epochs: bool
    found: Difference
    at_began: Difference
    batch_of: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """What differs between two undisturbed references: by name, the step that it is first seen at.

    `metrics` are the largest distances over all steps. `is_of_training` is false if only objects in
    no part and generators differ, which then changed nothing.
    """

    batch: int | None
    gradients: int | None
    components: Mapping[str, int]
    metrics: Mapping[str, float]
    rates: int | None
    is_of_training: bool
    first_step: int


def steps_of(lines: Iterable[Line]) -> dict[int, Line]:
    """Return the lines of complete steps by their step."""
    return {line.step: line for line in lines if line.kind == "step"}


def beginning(lines: Iterable[Line]) -> Line | None:
    """Return the line that a process wrote before its first step."""
    return next((line for line in lines if line.kind == "began"), None)


def last_steps(processes: Sequence[Sequence[Line]]) -> dict[int, Line]:
    """Return for each step the line of the process that completed it last."""
    return {step: line for lines in processes for step, line in steps_of(lines).items()}


def difference(reference: Line, line: Line, masked: Iterable[str] = ()) -> Difference:
    """Return what differs, without the components that are `masked`."""
    return Difference(
        batch=_differ(reference.batch, line.batch),
        metrics=_pairs(reference.metrics, line.metrics),
        gradients=_differ(reference.gradients, line.gradients),
        components=_components(reference, line, frozenset(masked)),
        rates=(reference.rates, line.rates) if reference.rates != line.rates else None,
    )


def first_divergence(
    reference: Sequence[Line], processes: Sequence[Sequence[Line]], masked: Iterable[str] = ()
) -> Divergence | None:
    """Return the first difference of training in the order in which things happened, or None.

    Steps that were lost in a death and done again count each time: all of them must be right.
    """
    for index, line, found in _differences(reference, processes, frozenset(masked)):
        if not found.is_of_training:
            continue
        lines = processes[index]
        began = beginning(lines)
        same = [step for step, one in steps_of(reference).items() if found.batch and one.batch == line.batch]
        return Divergence(
            process=index,
            began_at=0 if began is None else began.step,
            is_resumed=index > 0,
            step=line.step,
            is_between_epochs=line.kind == "epoch",
            found=found,
            at_began=not_restored(reference, lines, masked),
            batch_of=same[0] if same else None,
        )
    return None


def unkept(
    reference: Sequence[Line], processes: Sequence[Sequence[Line]], masked: Iterable[str] = ()
) -> dict[str, int]:
    """Return the objects in no part that differ after a resume, with the step that it is first seen at."""
    found: dict[str, int] = {}
    for _, line, differs in _differences(reference, processes, frozenset(masked)):
        for name in differs.components:
            if name.startswith(FOUND):
                found.setdefault(name, line.step)
    return found


def not_restored(reference: Sequence[Line], lines: Sequence[Line], masked: Iterable[str] = ()) -> Difference:
    """Return what differs as a process begins from what the reference had there."""
    began = beginning(lines)
    expected = None if began is None else _state_at(reference, began)
    if began is None or expected is None:
        return Difference()
    differs = difference(expected, began, masked)
    # A run that has just begun has no batch, metric or gradient yet.
    return Difference(components=differs.components, rates=differs.rates)


def unchanging(reference: Sequence[Line]) -> frozenset[str]:
    """Return the objects in no part that are the same in all lines."""
    values: dict[str, set[str]] = {}
    for line in reference:
        for name, digest in line.components.items():
            if name.startswith(FOUND):
                values.setdefault(name, set()).add(digest)
    return frozenset(name for name, found in values.items() if len(found) == 1)


def noise(reference: Sequence[Line], second: Sequence[Line]) -> Noise | None:
    """Return what differs between two references that nobody disturbed, or None."""
    seen = [(line.step, found) for _, line, found in _differences(reference, [second], frozenset())]
    if not seen:
        return None
    of_training = [step for step, found in seen if _is_told(found)]
    components: dict[str, int] = {}
    for step, found in seen:
        for name in found.components:
            components.setdefault(name, step)
    return Noise(
        batch=next((step for step, found in seen if found.batch), None),
        gradients=next((step for step, found in seen if found.gradients), None),
        rates=next((step for step, found in seen if found.rates), None),
        components=components,
        metrics=distances(steps_of(reference), steps_of(second)),
        is_of_training=bool(of_training),
        first_step=(of_training or [step for step, _ in seen])[0],
    )


def distances(reference: Mapping[int, Line], other: Mapping[int, Line]) -> dict[str, float]:
    """Return for each metric that differs the largest distance over the steps that both have."""
    found: dict[str, float] = {}
    for step in reference.keys() & other.keys():
        for name, (one, two) in _pairs(reference[step].metrics, other[step].metrics).items():
            distance = abs(number(one) - number(two))
            found[name] = max(found.get(name, 0.0), math.inf if math.isnan(distance) else distance)
    return found


def number(text: str | None) -> float:
    """Return the float of a line, not a number if it is absent."""
    return math.nan if text is None else float.fromhex(text)


def _differences(
    reference: Sequence[Line], processes: Sequence[Sequence[Line]], masked: frozenset[str]
) -> Iterator[tuple[int, Line, Difference]]:
    """Yield each line that differs from that of the reference, with the index of its process."""
    expected = {(line.kind, line.step): line for line in reference if line.kind in _COMPARED}
    for index, lines in enumerate(processes):
        for line in lines:
            same = expected.get((line.kind, line.step))
            found = Difference() if same is None else difference(same, line, masked)
            if found != Difference():
                yield index, line, found


def _is_told(found: Difference) -> bool:
    """Tell whether more differs than generators and objects in no part: those that nobody seeded do."""
    return Difference(
        batch=found.batch,
        metrics=found.metrics,
        gradients=found.gradients,
        components={name: pair for name, pair in found.components.items() if not name.startswith(GENERATORS)},
        rates=found.rates,
    ).is_of_training


def _state_at(reference: Sequence[Line], began: Line) -> Line | None:
    if began.step == 0:
        return beginning(reference)
    # Of an observed script there is a line of just that moment.
    kinds = ("epoch",) if began.is_between_epochs else ("ready", "step")
    there = {line.kind: line for line in reversed(reference) if line.step == began.step}
    return next((there[kind] for kind in kinds if kind in there), None)


def _components(reference: Line, line: Line, masked: frozenset[str]) -> dict[str, Pair]:
    pairs = _pairs(reference.components, line.components)
    # What is found depends on what was made so far; absence alone says nothing.
    told = {
        name: pair
        for name, pair in pairs.items()
        if name not in masked and not (name.startswith(FOUND) and None in pair)
    }
    return {name: told[name] for name in sorted(told, key=_order_of_causes)}


def _order_of_causes(name: str) -> tuple[int, str]:
    if name.startswith(FOUND):
        return 0, name
    return (2, name) if name.startswith(GENERATORS) else (1, name)


def _pairs(reference: Mapping[str, str], other: Mapping[str, str]) -> dict[str, Pair]:
    names = [*reference, *(name for name in other if name not in reference)]
    return {
        name: (reference.get(name), other.get(name))
        for name in names
        if reference.get(name) != other.get(name)
    }


def _differ(reference: str | None, other: str | None) -> bool:
    # One that is absent was not looked at.
    return reference is not None and other is not None and reference != other
