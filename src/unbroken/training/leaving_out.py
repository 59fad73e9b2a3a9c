"""Batches that a run leaves out since a roll-back: read, and given to nobody."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from unbroken.frameworks.rng import capture_global_rng, restore_present_rng
from unbroken.rundir.rollbacks import Rollback, Window


def windows_of(rollbacks: Iterable[Rollback]) -> tuple[Window, ...]:
    """Return all that a run leaves out after these roll-backs."""
    return tuple(window for one in rollbacks for window in one.windows)


def in_words(rollbacks: Sequence[Rollback], ranks: int) -> list[str]:
    """Return what is to be said of it at the start of a run of so many `ranks`, in lines."""
    if not rollbacks:
        return []
    last, windows = rollbacks[-1], windows_of(rollbacks)
    times = "once" if len(rollbacks) == 1 else f"{len(rollbacks)} times"
    line = f"rolled back {times}, at last from step {last.found_step}: {last.reason}"
    shown = "; ".join(map(window_in_words, windows[-3:]))
    lines = [line, *([f"left out: {'...; ' if len(windows) > 3 else ''}{shown}"] if windows else [])]
    others = sorted({one.ranks for one in rollbacks if one.windows and one.ranks != ranks})
    return lines + [
        f"batches to leave out were counted with {count} rank{'s'[: count != 1]}, and hold other samples now"
        for count in others
    ]


def window_in_words(window: Window) -> str:
    """Return a window for people, who count epochs and batches from 0 as well."""
    first, last = window.first, window.last
    count = f"batch {first}" if first == last else f"batches {first}-{last}"
    which = f", pass {window.pass_index}" if window.pass_index else ""
    return f"{count} of epoch {window.epoch}{which}"


def last_left_out(windows: Sequence[Window], place: tuple[int, int] | None, number: int) -> int | None:
    """Return the last batch of the windows that batch `number` of the pass at `place` is in, or None.

    `place` is the epoch and the index of the pass in it.
    """
    last = None
    # One window may begin inside another, and end after it.
    for one in sorted(windows, key=lambda one: one.first):
        is_here = (one.epoch, one.pass_index) == place and one.first <= (number if last is None else last + 1)
        if is_here and one.last >= (number if last is None else last + 1):
            last = one.last
    return last


@contextmanager
def process_generators_kept() -> Iterator[None]:
    """Leave the random generators of the process as they were: what is read in here was never read."""
    before = capture_global_rng()
    try:
        yield
    finally:
        restore_present_rng(before)
