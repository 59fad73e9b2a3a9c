"""What a drill and the run that it rehearses say to each other: a plan in one file, a record in another.

The drill writes a plan and names its file in the environment. The run then uses the directory of the
plan instead of its own, writes down what it has at each step, and dies where the plan says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from unbroken.errors import UsageError

# Names the file of the plan.
PLAN_VARIABLE = "UNBROKEN_REHEARSAL"
Moment = Literal["in-step", "after-step", "in-save", "in-evaluation", "end-of-epoch"]
SignalName = Literal["SIGKILL", "SIGTERM", "SIGINT"]


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """One death: at `moment`, once `step` steps are complete, by that signal to the process itself."""

    step: int
    moment: Moment
    signal: SignalName = "SIGKILL"


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """How to watch a script that has no run: from outside, by what its framework does.

    `original` is the user's own directory, of which the script has a copy: nothing may be written there.
    `reference` is the record by which a resumed process finds out which step it goes on from; without it
    the process begins anew.
    """

    original: str
    reference: str | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What one process of a script is to do.

    `directory` is the run directory, `record` the file that lines are appended to. The run ends of itself,
    with exit code 0, when `steps` are complete, and saves after each of `save_at`. At the steps of
    `dump_at` it writes the value of every component below `values`. After a resume from the checkpoint at
    `put_back_at`, the components named by `put_back` get the values that lie there.
    """

    directory: str
    record: str
    steps: int
    save_at: tuple[int, ...] = ()
    kill: Kill | None = None
    values: str | None = None
    dump_at: tuple[int, ...] = ()
    put_back: tuple[str, ...] = ()
    put_back_at: int | None = None
    observed: Observed | None = None


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a process had at `step`.

    "began" is the state as the first step of a process is about to begin, after a resume from `step` or
    anew; "step" is the state when that step was complete; "killed" is written right before a death.
    "epoch" is the state as the first step of a later epoch is about to begin, after what the script did
    between the two. A "began" with `is_between_epochs` was resumed from the end of an epoch's body, and
    equals the "epoch" of that step; any other equals the "step".
    Of an observed script, "ready" is the state as the step after `step` begins, at the first call of a
    trained module, and a "began" equals that; "saved" says that the script has saved something by then.
    `components` are digests by name, such as `model/encoder.weight`, `rng/numpy`,
    `found/__main__.augment.rng`; names below `found/` are of objects that are in no part. `batch` is the
    digest of the batches since the line before, `metrics` and `rates` are the floats as hexadecimal.
    `notes` say what could not be looked at, or not be put back.
    """

    kind: Literal["began", "step", "epoch", "ready", "saved", "killed"]
    step: int
    process: int = 0
    batch: str | None = None
    metrics: dict[str, str] = {}
    rates: tuple[str, ...] = ()
    gradients: str | None = None
    components: dict[str, str] = {}
    is_between_epochs: bool = False
    notes: tuple[str, ...] = ()


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor of a component: its dtype by the name that safetensors gives it, and its shape."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


class StoredValue(msgspec.Struct, frozen=True):
    """The value of a component: tagged JSON, as in a manifest, that refers to tensors by their paths."""

    state: Any
    tensors: tuple[StoredTensor, ...] = ()


def write_plan(plan: Plan, path: Path) -> None:
    """Write `plan` to `path`."""
    path.write_bytes(msgspec.json.encode(plan))


def planned() -> Plan | None:
    """Return the plan that a run of this process is to follow, or None if it is no rehearsal.

    Raises UsageError if there should be one and it cannot be read.
    """
    plan = _plan()
    # A script that is observed, a run in it too, resumes by itself.
    return plan if plan is not None and plan.observed is None else None


def planned_observation() -> tuple[Plan, Observed] | None:
    """Return the plan by which this process is to be observed, or None if it is not.

    Raises UsageError if there should be one and it cannot be read.
    """
    plan = _plan()
    return (plan, plan.observed) if plan is not None and plan.observed is not None else None


def _plan() -> Plan | None:
    path = os.environ.get(PLAN_VARIABLE)
    if path is None:
        return None
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Plan)
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(
            f"{PLAN_VARIABLE}: expected the plan of a drill in {path}, found {error}",
            hint=f"unset {PLAN_VARIABLE}, which `unbroken drill` sets for its own processes",
        ) from error


def read_record(path: Path) -> Iterator[Line]:
    """Yield the lines of a record; a last line that a death cut off is left out."""
    decoder = msgspec.json.Decoder(Line)
    for text in path.read_bytes().split(b"\n")[:-1]:
        yield decoder.decode(text)


def encode_line(line: Line) -> bytes:
    """Return `line` as it stands in a record, with its end."""
    return msgspec.json.encode(line) + b"\n"


def values_key(step: int, component: str) -> str:
    """Return the name of the file, below the directory of values, for a component at a step."""
    return f"{step}/{component.replace('%', '%25').replace('/', '%2F')}"


def write_value(path: Path, value: StoredValue, data: Iterable[bytes | memoryview]) -> None:
    """Write a component: `value` in a line, then the bytes of its tensors, one after the other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(msgspec.json.encode(value) + b"\n")
        for piece in data:
            file.write(piece)


def read_value(path: Path) -> tuple[StoredValue, dict[str, memoryview]]:
    """Return what `write_value` wrote: the value, and the bytes of its tensors by path."""
    content = path.read_bytes()
    text, end = memoryview(content), content.index(b"\n")
    value = msgspec.json.decode(text[:end], type=StoredValue)
    data, start = {}, end + 1
    for tensor in value.tensors:
        data[tensor.path] = text[start : start + tensor.size_bytes]
        start += tensor.size_bytes
    return value, data


def as_json(value: Any) -> Any:
    """Return a plan or a line as plain values."""
    return msgspec.to_builtins(value)
