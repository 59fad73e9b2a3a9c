"""Can training go on from a checkpoint, and how exactly: what is missing, suspicious or in the way. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from unbroken.inspection import roles
from unbroken.inspection.formats.base import CheckpointReader

Severity = Literal["error", "warning", "note"]
# Of a part's state: generators of the process under the keys that trainers use.
_RANDOM = ("rng", "random_state", "seed_state")
_FEW = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One thing to know before training goes on: what it is, what shows it, what to do about it.

    With an "error" training cannot go on as it was; with a "warning" it goes on otherwise than it would have.
    """

    severity: Severity
    text: str
    evidence: str
    remedy: str


def examine(reader: CheckpointReader, *, world_size: int | None = None) -> list[Advice]:
    """Return what a look at the headers tells, the worst first.

    `world_size` is the number of processes that are to go on from it, None if that is as it was.
    """
    found = [*_whole(reader), *_ranks(reader, world_size), *_complete(reader)]
    found += [*_of_trainers(reader, world_size), *_names(reader)]
    return worst_first(found)


def worst_first(found: Iterable[Advice]) -> list[Advice]:
    """Return advice by its severity."""
    order = ("error", "warning", "note")
    return sorted(found, key=lambda advice: order.index(advice.severity))


def _whole(reader: CheckpointReader) -> Iterator[Advice]:
    if reader.problems:
        first = reader.problems[0]
        more = f", and {len(reader.problems) - 1} more" if len(reader.problems) > 1 else ""
        yield Advice(
            severity="error",
            text="it is not whole",
            evidence=f"{first.file}: {first.problem}{more}",
            remedy=f"unbroken verify {reader.path}",
        )
    bad = reader.facts.get("non_finite") or {}
    if bad:
        yield Advice(
            severity="error",
            text="what is trained is not finite: nothing resumes from it by itself",
            evidence=", ".join(f"{path}: {count} numbers" for path, count in [*bad.items()][:_FEW]),
            remedy="unbroken ls, and take an older one",
        )
    validation = reader.facts.get("validation")
    if validation is not None and not validation["passed"]:
        yield Advice(
            severity="error",
            text="it failed the run's own validation: nothing resumes from it by itself",
            evidence=validation["reason"],
            remedy="unbroken ls, and take an older one",
        )


def _ranks(reader: CheckpointReader, world_size: int | None) -> Iterator[Advice]:
    saved = reader.facts.get("world_size")
    if world_size is None or world_size == saved or reader.facts.get("any_world_size"):
        return
    if saved is None:
        yield Advice(
            severity="note",
            text=f"it does not say for how many processes it is: {world_size} are not looked into",
            evidence=f"{reader.format} without a number of ranks",
            remedy="leave --world-size out",
        )
        return
    yield Advice(
        severity="error",
        text=f"{world_size} processes cannot load it directly: its state is cut for {saved}",
        evidence=f"{reader.format}, {saved} ranks",
        remedy=f"unbroken convert {reader.path} merged.safetensors, which puts it together by name",
    )


def _complete(reader: CheckpointReader) -> Iterator[Advice]:
    optimizers = roles.optimizers_in(reader)
    if not optimizers:
        yield Advice(
            severity="error",
            text="it holds no optimizer: training goes on with moments and rates begun anew",
            evidence=_kept(reader),
            remedy="take the checkpoint that the trainer resumes from, not the one for use",
        )
    for optimizer in optimizers:
        if not optimizer["states"] and optimizer["parameters"]:
            yield Advice(
                severity="warning",
                text=f"optimizer {optimizer['where'] or '(top)'} has no moments",
                evidence=f"{optimizer['parameters']} parameters, none with a state",
                remedy="right before the first step and for plain SGD; otherwise they were lost",
            )
    if not roles.schedulers(reader.values):
        yield Advice(
            severity="note",
            text="it holds no scheduler of the learning rate",
            evidence=_kept(reader),
            remedy="if training has one, its curve begins anew",
        )
    if not _has_randomness(reader.values):
        yield Advice(
            severity="warning",
            text="it holds no random generators: order, dropout and augmentation go on otherwise",
            evidence=_kept(reader),
            remedy="train with unbroken.Run, which keeps them",
        )
    if not roles.counters(reader.values) and "step" not in reader.facts:
        yield Advice(
            severity="warning",
            text="it does not say where training stood",
            evidence="no step, epoch or iteration at the top or one below",
            remedy="the script has to know the step by other means",
        )
    if "position" not in reader.facts:
        yield Advice(
            severity="warning",
            text="it does not say which samples of the epoch were seen",
            evidence=reader.format,
            remedy="go on at the beginning of an epoch, or train with unbroken.Run",
        )


def _of_trainers(reader: CheckpointReader, world_size: int | None) -> Iterator[Advice]:
    ranks = reader.facts.get("generators_of_ranks")
    if ranks is not None and world_size is not None and world_size != ranks:
        yield Advice(
            severity="warning",
            text=f"random generators are kept for {ranks} processes, and {world_size} are to go on",
            evidence=f"{reader.format}, a file of generators for each rank",
            remedy=f"go on with {ranks}: order, dropout and augmentation differ otherwise",
        )
    arguments = reader.values.get("training_args") if isinstance(reader.values, dict) else None
    state = arguments.get("state") if isinstance(arguments, dict) else None
    if isinstance(state, dict) and state.get("fp16") is True and "scaler" not in reader.values:
        yield Advice(
            severity="warning",
            text="it holds no scaler of the loss, though it was trained in float16",
            evidence="fp16 in training_args.bin, and no scaler.pt",
            remedy="the scale begins anew, and some first steps are left out",
        )


def _names(reader: CheckpointReader) -> Iterator[Advice]:
    for prefix, count in roles.wrappers(reader.tensors).items():
        yield Advice(
            severity="note",
            text=f"names have the prefix {prefix} of a wrapper",
            evidence=f"{count} of {len(reader.tensors)} tensors",
            remedy="unbroken.warm_start and Run leave it out by themselves; load_state_dict does not",
        )


def _has_randomness(values: Any) -> bool:
    if not isinstance(values, dict):
        return False
    inner = [key for item in values.values() if isinstance(item, dict) for key in item]
    return any(word in str(key).lower() for key in (*values, *inner) for word in _RANDOM)


def _kept(reader: CheckpointReader) -> str:
    top = ", ".join(map(str, reader.values)) if isinstance(reader.values, dict) else ""
    return f"it holds {top}" if top else f"it holds {len(reader.tensors)} tensors, and no values"
