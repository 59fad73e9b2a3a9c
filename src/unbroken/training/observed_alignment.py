"""Which step of a reference a process of an observed script goes on from: told by what it has.

Only the script knows its own step. What it restored is known: the components of its parts as its first
step begins, and those of the reference as each of its steps began.
"""

from __future__ import annotations

from collections.abc import Sequence

from unbroken.rundir.rehearsal import Line

_BESIDE = ("rng/", "found/")


def aligned(reference: Sequence[Line], began: Line, optimizer_steps: int) -> tuple[int, str | None]:
    """Return the step that `began` is of, and a note if that is not sure.

    It is the one with most components in common, among those that change at all. Where several have as
    many, the first batch decides, then `optimizer_steps`, which is what the optimizers themselves count.
    """
    states = {line.step: line for line in reference if line.kind in ("began", "ready")}
    common = {step: _in_common(states, line, began) for step, line in states.items()}
    most = max(common.values(), default=0)
    if most:
        best = [step for step in states if common[step] == most]
        return min(
            best, key=lambda step: (_is_other_batch(states[step], began), abs(step - optimizer_steps))
        ), None
    if optimizer_steps in states and optimizer_steps:
        return optimizer_steps, "nothing that it began with is of any step; its optimizers tell this one"
    of_batch = [step for step, line in states.items() if not _is_other_batch(line, began)]
    if len(of_batch) == 1 and began.batch is not None:
        return of_batch[0], "nothing that it began with is of any step; its first batch tells this one"
    return 0, "nothing that it began with is of any step: it is compared from the beginning on"


def _in_common(states: dict[int, Line], line: Line, began: Line) -> int:
    return sum(
        1
        for name, digest in line.components.items()
        if not name.startswith(_BESIDE) and began.components.get(name) == digest and _changes(states, name)
    )


def _changes(states: dict[int, Line], name: str) -> bool:
    values = [line.components.get(name) for line in states.values()]
    return any(value != values[0] for value in values)


def _is_other_batch(line: Line, began: Line) -> bool:
    return line.batch != began.batch
