"""Equality of runs: was one trained exactly as the other, step by step and down to the last bit?

It reads journals and checkpoints from disk and needs no framework.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from unbroken.checkpoint.manifest import Manifest
from unbroken.checkpoint.store import Checkpoint, CheckpointStore
from unbroken.errors import CheckpointNotFoundError, UsageError
from unbroken.rundir import layout
from unbroken.rundir.journal import read_events
from unbroken.state.tensors import HostTensor

_LOGGED = ("step", "record")
_ROLLED_BACK = "rolled-back"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """What one attempt logged of one step; `kind` is "step", or "record" for metrics of an epoch."""

    attempt: int
    kind: str
    step: int
    epoch: int
    metrics: dict[str, Any]

    @property
    def place(self) -> str:
        """The step in words: "step 12", or "record at step 12"."""
        return f"step {self.step}" if self.kind == "step" else f"{self.kind} at step {self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """What was compared, and a line for each difference, in the order of the steps.

    `values` counts the metric values of `steps` and records; `repeated_steps` those that more than
    one attempt of a run did, in both runs together; `tensors` those of the final state.
    """

    steps: int
    values: int
    repeated_steps: int
    tensors: int
    differences: tuple[str, ...]

    @property
    def is_identical(self) -> bool:
        return not self.differences


def compare_runs(expected: str | os.PathLike[str], found: str | os.PathLike[str]) -> RunComparison:
    """Compare the run in directory `found` with the one in `expected`, bit for bit.

    Every metric that any attempt logged must be the same in both, also where a step was repeated
    after a resume, but for the steps that a roll-back undid; so must the whole state in their newest
    checkpoints: each tensor, optimizer, generator, the position in the data. Only what names the run,
    the attempt, the time and the environment may differ.

    Raises:
        UsageError: one of them has logged no step.
        CheckpointNotFoundError: one of them has no checkpoint.
        DamagedError: a final checkpoint is not what was written.
    """
    first, second = Path(expected), Path(found)
    logs = [_logged(first), _logged(second)]
    histories = [_by_place(log) for log in logs]
    tensors, differences = compare_checkpoints(_final(first), _final(second))
    return RunComparison(
        steps=_count_steps(histories[0]),
        values=sum(len(times[0].metrics) for times in histories[0].values()),
        repeated_steps=sum(_count_repeated(history) for history in histories),
        tensors=tensors,
        differences=(
            *_repeated_differently(histories[0]),
            *_repeated_differently(histories[1]),
            *_logged_differently(*histories),
            *differences,
        ),
    )


def read_logged_steps(directory: str | os.PathLike[str]) -> list[LoggedStep]:
    """Return what all attempts of the run in `directory` logged, in the order in which they did."""
    return [
        _logged_step(attempt, event)
        for attempt, event in _events(Path(directory))
        if event["kind"] in _LOGGED
    ]


def compare_checkpoints(expected: Checkpoint, found: Checkpoint) -> tuple[int, list[str]]:
    """Return how many tensors were compared, and a line for each difference in the state."""
    first, second = expected.load_tensors(), found.load_tensors()
    differences = [
        *_different_values(_values(expected.manifest), _values(found.manifest)),
        *_different_tensors(first, second),
        *(
            f"tensor {path}: shared with {found.manifest.tensors[path].aliases}, not with {entry.aliases}"
            for path, entry in expected.manifest.tensors.items()
            if path in second and found.manifest.tensors[path].aliases != entry.aliases
        ),
    ]
    return len(first.keys() & second.keys()), differences


def _events(directory: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for attempt in layout.attempts(directory):
        for event in read_events(layout.attempt_directory(directory, attempt) / layout.events_file()):
            yield attempt, event


def _logged_step(attempt: int, event: Mapping[str, Any]) -> LoggedStep:
    return LoggedStep(
        attempt=attempt,
        kind=event["kind"],
        step=event["step"],
        epoch=event["epoch"],
        metrics=event["metrics"],
    )


def _logged(directory: Path) -> list[LoggedStep]:
    """Return what was logged, without the steps that a roll-back undid: what follows it is other training."""
    logged: list[LoggedStep] = []
    for attempt, event in _events(directory):
        if event["kind"] == _ROLLED_BACK:
            logged = [entry for entry in logged if entry.step <= event["step"]]
        elif event["kind"] in _LOGGED:
            logged.append(_logged_step(attempt, event))
    if not any(entry.kind == "step" for entry in logged):
        raise UsageError(
            f"{directory}: expected a run that logged steps, found none",
            hint="compare the directories that were given to unbroken.Run",
        )
    return logged


def _final(directory: Path) -> Checkpoint:
    store = CheckpointStore(directory)
    names = store.names()
    if not names:
        raise CheckpointNotFoundError(
            f"{directory}: expected a final checkpoint, found none", hint="let the run end, then compare"
        )
    # Not store.latest(), which passes over a damaged one.
    return store.get(names[-1])


# For each place in the order of training, what each attempt that came by logged there.
_History: TypeAlias = Mapping[tuple[int, bool, int], list[LoggedStep]]


def _by_place(logged: Iterable[LoggedStep]) -> _History:
    history: dict[tuple[int, bool, int], list[LoggedStep]] = {}
    seen: Counter[tuple[int, int, bool]] = Counter()
    for entry in logged:
        # A step, then what was recorded of it: a script may do so several times, in the same order.
        is_record = entry.kind != "step"
        occurrence = seen[entry.attempt, entry.step, is_record]
        seen[entry.attempt, entry.step, is_record] += 1
        history.setdefault((entry.step, is_record, occurrence), []).append(entry)
    return dict(sorted(history.items()))


def _count_steps(history: _History) -> int:
    return sum(times[0].kind == "step" for times in history.values())


def _count_repeated(history: _History) -> int:
    return sum(times[0].kind == "step" and len(times) > 1 for times in history.values())


def _repeated_differently(history: _History) -> Iterator[str]:
    for first, *repeated in history.values():
        for again in repeated:
            yield from _different_metrics(f"{first.place}, repeated in attempt {again.attempt}", first, again)


def _logged_differently(expected: _History, found: _History) -> Iterator[str]:
    for place in sorted(expected.keys() | found.keys()):
        one, other = expected.get(place), found.get(place)
        if one is not None and other is not None:
            yield from _different_metrics(one[0].place, one[0], other[0])
        elif one is not None:
            yield f"{one[0].place}: missing"
        elif other is not None:
            yield f"{other[0].place}: not expected"


def _different_metrics(label: str, expected: LoggedStep, found: LoggedStep) -> Iterator[str]:
    if expected.epoch != found.epoch:
        yield f"{label}: expected epoch {expected.epoch}, found {found.epoch}"
    for name in sorted(expected.metrics.keys() | found.metrics.keys()):
        before, after = expected.metrics.get(name), found.metrics.get(name)
        if not _same_bits(before, after):
            yield f"{label}: expected {name} {_show(before)}, found {_show(after)}"


def _same_bits(first: Any, second: Any) -> bool:
    """Tell whether two values of a journal are of one type and the same; 0.0 and -0.0 are not."""
    if isinstance(first, float) and isinstance(second, float):
        return first == second and math.copysign(1.0, first) == math.copysign(1.0, second)
    return type(first) is type(second) and bool(first == second)


def _show(value: Any) -> str:
    return f"{value!r} ({value.hex()})" if isinstance(value, float) else repr(value)


def _values(manifest: Manifest) -> dict[str, Any]:
    """Return all that a manifest says about the state itself, by the place where it says it."""
    values: dict[str, Any] = {
        "step": manifest.step,
        "metrics": manifest.metrics,
        "config": manifest.config,
        "position": msgspec.to_builtins(manifest.position),
    }
    return values | {f"part {name}": msgspec.to_builtins(part) for name, part in manifest.parts.items()}


def _different_values(expected: Any, found: Any, place: str = "") -> Iterator[str]:
    """Yield a line for each innermost value that differs."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for name in sorted(expected.keys() | found.keys()):
            below = f"{place}/{name}" if place else name
            if name not in found or name not in expected:
                yield f"final state, {below}: {'missing' if name in expected else 'not expected'}"
            else:
                yield from _different_values(expected[name], found[name], below)
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for index, (one, other) in enumerate(zip(expected, found, strict=True)):
            yield from _different_values(one, other, f"{place}/{index}")
    elif not _same_bits(expected, found):
        yield f"final state, {place}: expected {_show(expected):.80}, found {_show(found):.80}"


def _different_tensors(expected: Mapping[str, HostTensor], found: Mapping[str, HostTensor]) -> Iterator[str]:
    for path in sorted(expected.keys() | found.keys()):
        if path not in found or path not in expected:
            yield f"tensor {path}: {'missing' if path in expected else 'not expected'}"
            continue
        one, other = expected[path], found[path]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            yield f"tensor {path}: expected {one.dtype} {one.shape}, found {other.dtype} {other.shape}"
        elif one.data != other.data:
            pairs = enumerate(zip(one.data, other.data, strict=True))
            places = [index for index, (before, after) in pairs if before != after]
            total = one.data.nbytes
            yield f"tensor {path}: {len(places)} of {total} bytes differ, the first at {places[0]}"
