"""The one history that the journals of all attempts tell: which steps count, and which were superseded.

A run goes back where an attempt begins from an older checkpoint, and where it is rolled back. What was
journaled of the steps behind is superseded: they are done again, or were undone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from unbroken.errors import StorageError
from unbroken.rundir import layout
from unbroken.rundir.journal import parse_event
from unbroken.storage.failures import failed

_GOES_BACK = ("began", "rolled-back")
# The fast parser refuses lines that are torn, and a few that are not, such as half of a surrogate pair.
_ODD = (msgspec.DecodeError, UnicodeDecodeError)


class Head(NamedTuple):
    """What decides of an event: its kind, and its step if it has one."""

    kind: str
    step: int | None


class Placed(NamedTuple):
    """An event in the history of a run.

    `stretch` counts from 0 and grows by one where the run goes back. `counts` tells that nothing since has
    superseded the step of this event; events without a step always count.
    """

    attempt: int
    stretch: int
    counts: bool
    event: dict[str, Any]


def last_steps(attempts: Iterable[Iterable[Head]]) -> list[int | None]:
    """Return the last step that counts of each stretch of a run's work; None: all that it has.

    >>> began, step = Head("began", 0), [Head("step", number) for number in (1, 2, 3)]
    >>> last_steps([[began, *step], [Head("began", 2), step[2]]])
    [2, None]
    """
    turns = [turn for heads in attempts for turn in _turns(heads) if turn is not None]
    found: list[int | None] = [None] * len(turns)
    for place in range(len(turns) - 2, -1, -1):
        later = found[place + 1]
        found[place] = turns[place + 1] if later is None else min(later, turns[place + 1])
    return found


def placed(
    attempts: Iterable[tuple[int, Iterable[dict[str, Any]]]], last: Sequence[int | None]
) -> Iterator[Placed]:
    """Yield the events of `attempts`, in order, each with whether it counts; `last` is as `last_steps` gives.

    Of the events of the kind "step" those that count have steps that strictly increase.
    """
    stretch = -1
    for attempt, events in attempts:
        turns = _Turns()
        for event in events:
            head = Head(event["kind"], step_of(event.get("step")))
            if turns.after(head) is not None:
                stretch += 1
            bound = last[stretch] if stretch >= 0 else None
            yield Placed(attempt, stretch, bound is None or (head.step or 0) <= bound, event)


def step_of(value: object) -> int | None:
    """Return the step that an event's field stands for, or None if it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


@dataclass(slots=True)
class History:
    """The history of the run in `directory`, as long as its journals are now.

    Its events are read again each time that it is iterated over; what is appended meanwhile is left out.
    `saved` are the steps that each attempt made a checkpoint of.

    Raises StorageError, here or then.
    """

    directory: Path
    saved: dict[int, set[int]] = field(default_factory=dict)
    _journals: list[_Journal] = field(default_factory=list)
    _last: list[int | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        places = [(n, layout.attempt_directory(self.directory, n)) for n in layout.attempts(self.directory)]
        self._journals = [_Journal(number, place / layout.events_file()) for number, place in places]
        self._last = last_steps(self._noted(journal) for journal in self._journals)

    def __iter__(self) -> Iterator[Placed]:
        return placed(((one.attempt, one.events()) for one in self._journals), self._last)

    def _noted(self, journal: _Journal) -> Iterator[Head]:
        saved = self.saved.setdefault(journal.attempt, set())
        for head in journal.heads():
            if head.kind == "saved" and head.step is not None:
                saved.add(head.step)
            yield head


class _Turns:
    """Tells, of the events of one attempt, where the run goes back, or on from what is older."""

    def __init__(self) -> None:
        self._step: int | None = None

    def after(self, head: Head) -> int | None:
        """Return the step gone back to, if this event shows that the run has; it may be where it stands."""
        if head.step is None:
            return None
        before = self._step
        if head.kind in _GOES_BACK:
            self._step = head.step
            return head.step
        if head.kind == "step":
            self._step = head.step
            # The line that said so was lost: torn, or on a full disk.
            return head.step - 1 if before is None or head.step <= before else None
        return None


def _turns(heads: Iterable[Head]) -> Iterator[int | None]:
    turns = _Turns()
    return (turns.after(head) for head in heads)


class _Line(msgspec.Struct):
    kind: str
    step: Any = None


class _Journal:
    """The lines of one attempt's journal, up to the size that the file has when this is made."""

    def __init__(self, attempt: int, path: Path) -> None:
        self.attempt = attempt
        self._path = path
        try:
            self._size_bytes = os.stat(path).st_size
        except (FileNotFoundError, NotADirectoryError):
            self._size_bytes = 0
        except OSError as error:
            raise failed("read", path, error) from error

    def heads(self) -> Iterator[Head]:
        decode = msgspec.json.Decoder(_Line).decode
        for line in self._lines():
            try:
                found = decode(line)
                yield Head(found.kind, step_of(found.step))
            except _ODD:
                event = parse_event(line)
                if event is not None:
                    yield Head(event["kind"], step_of(event.get("step")))

    def events(self) -> Iterator[dict[str, Any]]:
        decode = msgspec.json.Decoder(dict[str, Any]).decode
        for line in self._lines():
            try:
                event: dict[str, Any] | None = decode(line)
            except _ODD:
                event = parse_event(line)
            if event is not None and isinstance(event.get("kind"), str):
                yield event

    def _lines(self) -> Iterator[bytes]:
        if not self._size_bytes:
            return
        left = self._size_bytes
        try:
            with self._path.open("rb") as file:
                for line in file:
                    left -= len(line)
                    if left < 0:
                        return
                    yield line
        except FileNotFoundError as error:
            raise StorageError(
                f"{self._path}: expected the journal that was just there, found none",
                hint="the run was moved or removed meanwhile; try again",
            ) from error
        except OSError as error:
            raise failed("read", self._path, error) from error
