"""The whole of a drill: two references, the run that is killed, and the proof of what went wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from unbroken.drill.causes import prove, suspects
from unbroken.drill.comparison import (
    distances,
    first_divergence,
    last_steps,
    noise,
    steps_of,
    unchanging,
    unkept,
)
from unbroken.drill.plans import random_kills, saves, wanted_kills
from unbroken.drill.process import UnplannedEndError, surroundings
from unbroken.drill.rehearsal import Compare, KilledRun, Progress, Rehearsal
from unbroken.drill.stages import Observation, ObservedStage, RunStage
from unbroken.drill.verdict import Findings
from unbroken.rundir.rehearsal import Kill

_HASH_SEED = "PYTHONHASHSEED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a user wants of a drill; `at` are kills that take the place of those chosen by `seed`.

    With `observation` the script is one that does not use `unbroken`.
    """

    steps: int
    kills: int
    seed: int
    at: tuple[Kill, ...] = ()
    timeout_seconds: float
    observation: Observation | None = None


def drill(
    command: Sequence[str], wishes: Wishes, root: Path, *, environment: Mapping[str, str], progress: Progress
) -> Findings:
    """Rehearse `command` below the empty directory `root` and return what was seen.

    Raises UsageError if the script records no step, or is over before a kill that was asked for.
    """
    around, observation = surroundings(environment), wishes.observation
    stage = (
        RunStage(command, around)
        if observation is None
        else ObservedStage(command, observation, root, around)
    )
    rehearsal = Rehearsal(stage, root, timeout_seconds=wishes.timeout_seconds, progress=progress)
    found = Findings(
        command=tuple(command),
        seed=wishes.seed,
        is_observed=observation is not None,
        resume_arguments=() if observation is None else observation.resume_arguments,
        reference=(),
        distances={},
    )
    try:
        found = replace(found, reference=rehearsal.reference("reference", wishes.steps))
        kills = (
            wanted_kills(wishes.at, found.steps)
            if wishes.at
            else random_kills(found.steps, wishes.kills, wishes.seed)
        )
        found = _second(found, rehearsal, environment)
    except UnplannedEndError as failure:
        return replace(found, failure=f"an undisturbed run {failure.what}", output=failure.output)
    return _killed(found, rehearsal, kills)


def _second(found: Findings, rehearsal: Rehearsal, environment: Mapping[str, str]) -> Findings:
    second = rehearsal.reference("second reference", found.steps)
    seen = noise(found.reference, second)
    if seen is None or not seen.is_of_training or environment.get(_HASH_SEED, "random") != "random":
        return replace(found, noise=seen)
    pinned = [
        rehearsal.reference(f"reference {number} with {_HASH_SEED}=0", found.steps, {_HASH_SEED: "0"})
        for number in (3, 4)
    ]
    left = noise(*pinned)
    return replace(found, noise=seen, is_hash_order=left is None or not left.is_of_training)


def _killed(found: Findings, rehearsal: Rehearsal, kills: Sequence[Kill]) -> Findings:
    masked = _masked(found)
    compare = _comparison(found)
    killed = rehearsal.killed(kills, saves(kills, found.seed), steps=found.steps, compare=compare)
    lines = [process.lines for process in killed.processes]
    is_noisy = found.noise is not None and found.noise.is_of_training
    found = replace(
        found,
        processes=killed.processes,
        missed=killed.missed,
        distances=distances(steps_of(found.reference), last_steps(lines)),
        divergence=killed.divergence,
        unkept={} if is_noisy else unkept(found.reference, lines, masked),
        notes=tuple(dict.fromkeys(note for line in chain(found.reference, *lines) for note in line.notes)),
    )
    if killed.failure is not None:
        return replace(found, failure=_who(killed), output=killed.failure.output)
    if killed.divergence is None or not killed.divergence.is_resumed:
        return found
    found = replace(found, suspects=suspects(killed.divergence.at_began))
    return _caused(found, rehearsal, killed, compare) if found.suspects else found


def _comparison(found: Findings) -> Compare:
    """Return how to find the first difference; a script that is not deterministic has one anyway."""
    if found.noise is not None and found.noise.is_of_training:
        return lambda processes: None
    return lambda processes: first_divergence(found.reference, processes, _masked(found))


def _masked(found: Findings) -> frozenset[str]:
    noisy = frozenset() if found.noise is None else frozenset(found.noise.components)
    # An observed script is resumed by other arguments, and what never changes is no state.
    return noisy | unchanging(found.reference) if found.is_observed else noisy


def _caused(found: Findings, rehearsal: Rehearsal, killed: KilledRun, compare: Compare) -> Findings:
    assert killed.divergence is not None, "asked only where there is one"
    began_at = killed.divergence.began_at
    values = rehearsal.values_at(began_at)
    found = replace(found, suspects=rehearsal.kinds(values, began_at, found.suspects))
    is_right_with = rehearsal.trial(killed, values, steps=found.steps, compare=compare)
    # Without this one a proof would prove nothing: the rest could be right whatever is put back.
    if is_right_with(()):
        return replace(found, is_repeatable=False)
    proof = prove(found.suspects, is_right_with)
    notes = found.notes if proof is not None else (*found.notes, *rehearsal.not_put_back)
    return replace(found, is_repeatable=True, proof=proof, notes=notes)


def _who(killed: KilledRun) -> str:
    assert killed.failure is not None, "asked only where there is one"
    index = len(killed.processes)
    name = f"resume {index}" if index else "the first process"
    before = killed.processes[-1].plan.kill if killed.processes else None
    after = f", after {before.signal} {before.moment} {before.step}," if before is not None else ""
    return f"{name}{after} {killed.failure.what}"
