"""What watches an attempt while it runs, and what may follow from what it sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from unbroken.rundir.heartbeat import Beat


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """An attempt that runs: its number, its own directory and that of its run, and its leader's process.

    It `is_adopted` if another supervisor has started it.
    """

    attempt: int
    directory: Path
    run_directory: Path
    leader: int
    is_adopted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look at it. `now_seconds` is of a clock that never goes back; `beat` is the last heartbeat."""

    now_seconds: float
    beat: Beat | None
    is_stop_asked: bool
    has_leader: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AskToStop:
    """The attempt is to save and stop, within `seconds` if they are given, else within the run's grace.

    After a preemption the run is not over: whoever started it is told to run it again.
    """

    reason: str
    seconds: float | None = None
    is_preemption: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EndNow:
    """All processes of the attempt are to be ended. `because` is the verdict's evidence, `kind` its kind."""

    because: str
    kind: str = "by-supervisor"


Want: TypeAlias = AskToStop | EndNow | None


class Watcher(Protocol):
    """Looks at one attempt, about twice a second, in the supervisor's only thread: it must not wait."""

    def look(self, look: Look) -> Want:
        """Return what is to be done, if anything is."""

    def end(self) -> None:
        """Release what is held; nothing of the attempt is left."""


# Makes the watcher of one attempt; what a watcher knows beyond one attempt is in its maker.
MakeWatcher: TypeAlias = Callable[[Started], Watcher]
