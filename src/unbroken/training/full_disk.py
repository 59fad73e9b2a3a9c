"""A disk without space: training waits for it, goes on without saving, or ends, as the user chose."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, TypeVar

from unbroken.errors import StorageFullError
from unbroken.rundir.heartbeat import DISK_FULL
from unbroken.rundir.tell import tell

FullDiskPolicy = Literal["pause", "go-on", "fail"]
_T = TypeVar("_T")


class FullDisk:
    """What to do when something cannot be written for want of space.

    `beat(phase)` shows it in the heartbeat, and `is_asked_to_stop()` ends the waiting. "pause" tries
    again every `retry_seconds` until there is space.
    """

    def __init__(
        self,
        policy: FullDiskPolicy,
        *,
        beat: Callable[[str], None],
        is_asked_to_stop: Callable[[], bool],
        retry_seconds: float = 1.0,
    ) -> None:
        self._policy = policy
        self._beat = beat
        self._is_asked_to_stop = is_asked_to_stop
        self._retry_seconds = retry_seconds
        self.given_up = 0
        self.waited_seconds = 0.0
        self._told: set[str] = set()

    def write(self, act: Callable[[], _T], what: str) -> _T | None:
        """Return what `act` returns, or None if it was given up; `what` is named to people.

        Raises StorageFullError with "fail", and when it is asked to stop while it waits.
        """
        try:
            return act()
        except StorageFullError as error:
            return self.after(error, act, what)

    def write_surely(self, act: Callable[[], _T], what: str) -> _T:
        """Return what `act` returns: what cannot be done without. Raises StorageFullError unless it waits."""
        try:
            return act()
        except StorageFullError as error:
            if self._policy != "pause":
                raise
            return self._wait(error, act, what)

    def after(self, error: StorageFullError, again: Callable[[], _T], what: str) -> _T | None:
        """The same, when `error` has been met already."""
        if self._policy == "fail":
            raise error
        if self._policy == "go-on":
            self.given_up += 1
            if what not in self._told:
                self._told.add(what)
                tell(f"{what} could not be written, training goes on without: {error.message}")
            return None
        return self._wait(error, again, what)

    def tell_given_up(self) -> None:
        """Say how much was given up, if anything was."""
        if self.given_up:
            tell(f"the disk was full: {self.given_up} writes were given up on the way")

    def lose(self, error: StorageFullError, what: str) -> None:
        """Do without `what`, which is not worth waiting for; raises `error` with "fail"."""
        if self._policy == "fail":
            raise error
        tell(f"{what} is lost: {error.message}")

    def _wait(self, error: StorageFullError, again: Callable[[], _T], what: str) -> _T:
        tell(f"training waits for space to write {what}: {error.message}")
        since = time.monotonic()
        while True:
            self._beat(DISK_FULL)
            if self._is_asked_to_stop():
                raise error
            time.sleep(self._retry_seconds)
            waited_seconds = time.monotonic() - since
            try:
                found = again()
            except StorageFullError as still:
                error = still
                continue
            self.waited_seconds += waited_seconds
            tell(f"{what} is written after {time.monotonic() - since:.0f} seconds, training goes on")
            self._beat("training")
            return found
