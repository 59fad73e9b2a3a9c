"""Stops a run just before memory runs out: a stop saves the state, a kill takes the steps since the last."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

from unbroken.rundir import layout
from unbroken.rundir.host_memory import Memory, Use, host_memories
from unbroken.rundir.last_words import read_last_words
from unbroken.rundir.tell import tell

MemoryGuardPolicy = Literal["auto", "stop", "off"]
# How the reason of a stop begins; a later attempt knows by it why this one ended.
REASON = "the memory guard: "

# It is time to stop when so much is used and the rest lasts for no more than a few saves; or, since other
# things than this growth take some now and then, when hardly any is left and it lasts for ten minutes.
_NEARLY, _HARDLY_ANY_LEFT = 0.95, 0.98
_LONG_SECONDS = 600.0
_SAVES = 3
_SHORTEST_SAVE_SECONDS = 0.5
# What is looked back at is a little longer than what is looked ahead to.
_SAMPLES, _SPAN = 24, 20
_FEWEST_SAMPLES = 6
# Where beginning anew does not last, it is no cure: so often in a row at once, then only after a while.
_FREE_STOPS = 3
_WORTH_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A reading at `seconds` of a clock that never goes back."""

    seconds: float
    use: Use


def seconds_left(samples: Sequence[Sample]) -> float | None:
    """Return when the limit is met if memory goes on growing as it did; None if it does not grow.

    It counts from the most that was used: what was taken for a moment is going to be taken again.
    """
    third = len(samples) // 3
    first, last = list(samples)[:third], list(samples)[-third:]
    # Medians, so that one evaluation or one large batch does not pass for growth.
    grown = _middle(s.use.own_bytes for s in last) - _middle(s.use.own_bytes for s in first)
    if grown <= 0:
        return None
    took = _middle(s.seconds for s in last) - _middle(s.seconds for s in first)
    left = samples[-1].use.limit_bytes - max(sample.use.used_bytes for sample in samples)
    return max(0.0, left * took / grown)


def is_in_danger(samples: Sequence[Sample], horizon_seconds: float, share: float = _NEARLY) -> bool:
    """Tell whether that share is used and, as memory grows, all of it will be within `horizon_seconds`.

    A growth that was seen for less than half of that time proves nothing about it.
    """
    if len(samples) < _FEWEST_SAMPLES or samples[-1].seconds - samples[0].seconds < horizon_seconds / 2:
        return False
    use = samples[-1].use
    if use.used_bytes < share * use.limit_bytes:
        return False
    left = seconds_left(samples)
    return left is not None and left < horizon_seconds


def is_worth_it(stops_before: int, lived_seconds: float) -> bool:
    """Tell whether stopping now helps, after `stops_before` attempts in a row that were stopped like this."""
    return stops_before < _FREE_STOPS or lived_seconds >= _WORTH_SECONDS


class Watched:
    """One memory, and what was read of it lately and for long: enough samples for each, not more."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.due_seconds = 0.0
        self._lately: deque[Sample] = deque(maxlen=_SAMPLES)
        self._long: deque[Sample] = deque(maxlen=_SAMPLES)

    def look(self, now_seconds: float, horizon_seconds: float) -> Use | None:
        """Take a reading, and return it if memory is about to run out."""
        self.due_seconds = now_seconds + max(self.memory.every_seconds, horizon_seconds / _SPAN)
        use = self.memory.read()
        if use is None:
            self._lately.clear()
            self._long.clear()
            return None
        sample = Sample(seconds=now_seconds, use=use)
        self._lately.append(sample)
        is_close = is_in_danger(self._lately, horizon_seconds)
        if not self._long or now_seconds >= self._long[-1].seconds + _LONG_SECONDS / _SPAN:
            self._long.append(sample)
            is_close = is_close or is_in_danger(self._long, _LONG_SECONDS, _HARDLY_ANY_LEFT)
        return use if is_close else None


class MemoryGuard:
    """Watches the memory of a run between its steps.

    "stop" stops it with its state saved before memory runs out. "auto" does so under a supervisor, which
    starts it again at once; without one it saves once and goes on. `save_seconds()` is how long the last
    save took.
    """

    def __init__(
        self,
        policy: MemoryGuardPolicy,
        attempt_directory: Path,
        *,
        save_seconds: Callable[[], float],
        memories: Callable[[], Iterable[Memory]] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = policy
        self._attempt_directory = attempt_directory
        self._save_seconds = save_seconds
        self._now = now
        self._started_seconds = self._looked_seconds = now()
        found = [] if policy == "off" else (memories or _memories)()
        self._watched = [Watched(memory) for memory in found]
        self._due_seconds = 0.0 if self._watched else float("inf")
        self._is_save_wanted = False
        # How many attempts before this one were stopped like this, once it matters.
        self._stops: int | None = None

    def stop_reason(self) -> str | None:
        """Return why the run should stop, or None; most calls cost no more than a look at the clock."""
        now = self._now()
        if now < self._due_seconds:
            return None
        # A step may take longer than a save: before the next look there is one more of them.
        pause = now - self._looked_seconds
        self._looked_seconds = now
        horizon = _SAVES * max(self._save_seconds(), pause, _SHORTEST_SAVE_SECONDS)
        for watched in self._watched:
            use = watched.look(now, horizon) if now >= watched.due_seconds else None
            if use is not None:
                return self._act(watched.memory.name, use)
        self._due_seconds = min((watched.due_seconds for watched in self._watched), default=float("inf"))
        return None

    def take_save(self) -> bool:
        """Tell whether a save is wanted since the last call."""
        wanted, self._is_save_wanted = self._is_save_wanted, False
        return wanted

    def close(self) -> None:
        """Stop watching."""
        for watched in self._watched:
            watched.memory.close()
        self._watched = []
        self._due_seconds = float("inf")

    def _act(self, name: str, use: Use) -> str | None:
        used, limit = use.used_bytes / 1e9, use.limit_bytes / 1e9
        found = f"{used:.2f} of {limit:.2f} GB of {name} are used, and it grows"
        if self._policy == "auto" and layout.ATTEMPT_VARIABLE not in os.environ:
            # Nobody would start it again: what follows is up to the kernel.
            self._is_save_wanted = True
            tell(f"{found}: saving; under `unbroken run` it would be restarted in time")
            self.close()
            return None
        if self._stops is None:
            self._stops = _stops_in_a_row(self._attempt_directory)
            if not is_worth_it(self._stops, self._now() - self._started_seconds):
                tell(f"{found}; going on: the last {self._stops} attempts were stopped for that already")
        is_worth = is_worth_it(self._stops, self._now() - self._started_seconds)
        return f"{REASON}{found}" if is_worth else None


def _memories() -> list[Memory]:
    found = host_memories()
    if "torch" in sys.modules:
        from unbroken.frameworks.torch.memory import DeviceMemory

        found.append(DeviceMemory())
    return found


def _stops_in_a_row(attempt_directory: Path) -> int:
    """Return how many attempts just before this one were stopped by the guard, as far as that matters."""
    run_directory, number = attempt_directory.parents[1], int(attempt_directory.name)
    for count in range(_FREE_STOPS):
        words = read_last_words(layout.attempt_directory(run_directory, number - 1 - count))
        if words is None or not words.reason.startswith(REASON):
            return count
    return _FREE_STOPS


def _middle(values: Iterable[float]) -> float:
    return median(values)
