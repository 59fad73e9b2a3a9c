"""What the next attempt is told after memory ran out: how often to halve its batches.

The rule is stateless: it is read off the attempts that the run has left behind, whichever supervisor
watched them, and so is never forgotten but by `forget`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unbroken.errors import StorageError
from unbroken.rundir import layout
from unbroken.rundir.files import read_json
from unbroken.rundir.heartbeat import read_heartbeat
from unbroken.supervisor.records import say


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """An attempt that ended, by what it left: the cause in its verdict, the step of its newest checkpoint.

    `samples` is the size of its largest batch, 0 if it cannot split its batches, `halvings` how often it
    has halved them.
    """

    cause: str
    checkpoint_step: int
    halvings: int = 0
    samples: int = 0


def halvings(history: Sequence[Remembered]) -> int:
    """Return how often the next attempt is to halve its batches; `history` is in order.

    Once more than the attempt that ran out of memory had done, down to one sample. When that was memory
    of the host and there is a newer checkpoint, the cause may be a leak, for which a restart is enough: only
    without one does the batch count as too large.
    """
    wanted = 0
    newest = -1
    for ended in history:
        is_leak = ended.cause == "memory" and ended.checkpoint_step > newest
        is_out_of_memory = ended.cause in ("memory", "device-memory")
        if is_out_of_memory and not is_leak and 2**ended.halvings < ended.samples:
            wanted = max(wanted, ended.halvings + 1)
        newest = max(newest, ended.checkpoint_step)
    return wanted


def halvings_of_next(directory: Path) -> int:
    """Return how often the next attempt of the run in `directory` is to halve its batches."""
    return halvings(list(_all(directory).values()))


def parts_of_next(directory: Path, attempt: int, *, cause: str) -> int | None:
    """Return into how many parts the next attempt splits batches, None if into no more than `attempt` did.

    `attempt` ended for `cause`; whether its verdict is written already makes no difference.
    """
    history = _all(directory)
    own = history.get(attempt)
    if own is None or not own.samples:
        return None
    history[attempt] = replace(own, cause=cause)
    wanted = halvings(list(history.values()))
    return 2**wanted if wanted > own.halvings else None


def forget(directory: Path) -> None:
    """Let the next attempt of the run in `directory` begin with whole batches again."""
    for number in layout.attempts(directory):
        with suppress(FileNotFoundError):
            (layout.attempt_directory(directory, number) / layout.MICRO_BATCHES_FILE).unlink()


def _all(directory: Path) -> dict[int, Remembered]:
    try:
        numbers = layout.attempts(directory)
    except StorageError as error:
        say(f"the next attempt begins with whole batches: {error.message}")
        return {}
    return {number: _remember(layout.attempt_directory(directory, number)) for number in numbers}


def _remember(directory: Path) -> Remembered:
    mark = _read(directory / layout.MICRO_BATCHES_FILE)
    verdict = _read(directory / layout.VERDICT_FILE) if mark else {}
    beat = read_heartbeat(directory / layout.HEARTBEAT)
    return Remembered(
        cause=str(verdict.get("cause", "")),
        checkpoint_step=beat.checkpoint_step if beat is not None else -1,
        halvings=_number(mark, "halvings"),
        samples=_number(mark, "samples"),
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path) or {}
    except StorageError as error:
        say(f"the sizes of batches go on as they are: {error.message}")
        return {}


def _number(mark: dict[str, Any], name: str) -> int:
    value = mark.get(name)
    return value if isinstance(value, int) and value >= 0 else 0
