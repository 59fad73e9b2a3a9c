"""Watches an attempt for progress: tells of a slow one, takes the stacks of one that may hang, ends it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unbroken.errors import StorageError
from unbroken.rundir import layout
from unbroken.rundir.files import read_json, write_json
from unbroken.supervisor.hangs import hang_policy
from unbroken.supervisor.hangs.hang_policy import Course, Degree, HangPolicy, Limit, Pace, Sight
from unbroken.supervisor.hangs.stacks import Signs, StackDump, read_signs
from unbroken.supervisor.records import Records, say
from unbroken.supervisor.watcher import EndNow, Look, MakeWatcher, Started, Want

# Of one processor, and of bytes read and written a second: less may be a thread that only ticks.
_MOVES_CORES = 0.1
_MOVES_BYTES_PER_SECOND = 1 << 16
# Looking at the processes costs a few milliseconds, and what they use in less time says little; with a very
# short limit it is a quarter of that.
_SIGNS_SECONDS = 10.0
# Looks come twice a second: after such a pause this process, and the attempt perhaps, could not run.
_PAUSE_SECONDS = 5.0
_KEEP_SECONDS = 600.0
_OUTPUT_SECONDS = 30.0


def watchdog(policy: HangPolicy, records: Records) -> MakeWatcher:
    """Return what makes the watchdog of each attempt."""
    return lambda started: Watchdog(started, policy, records)


def read_pace(run_directory: Path) -> Pace:
    """Return how fast the run is known to go; nothing is known where that cannot be read."""
    try:
        value = read_json(run_directory / layout.PACE_FILE)
        return Pace() if value is None else Pace.from_json(value)
    except (StorageError, KeyError, TypeError, ValueError, AttributeError) as error:
        say(f"how fast the run goes is learned anew: {error}")
        return Pace()


@dataclass(frozen=True, slots=True)
class _Used:
    """What the attempt's processes had used at a moment."""

    at_seconds: float
    signs: Sequence[Signs]

    @property
    def cpu_seconds(self) -> float:
        return sum(sign.cpu_seconds for sign in self.signs)

    @property
    def moved_bytes(self) -> int:
        return sum(sign.moved_bytes for sign in self.signs)


class Watchdog:
    """Looks at the progress of one attempt: batches and steps, never a thread that merely lives."""

    def __init__(self, started: Started, policy: HangPolicy, records: Records) -> None:
        self._started = started
        self._policy = policy
        self._records = records
        now = time.monotonic()
        pace = read_pace(started.run_directory)
        self._course = hang_policy.begin(pace, now, is_adopted=started.is_adopted)
        self._looked_at = now
        self._kept, self._kept_at = self._course.pace, now
        self._degree: Degree = "fine"
        self._said = ""
        self._before: _Used | None = None
        self._now: _Used | None = None
        self._dump: StackDump | None = None
        self._output_at = now
        self._is_quiet_told = False

    def look(self, look: Look) -> Want:
        paused, self._looked_at = look.now_seconds - self._looked_at, look.now_seconds
        if paused > _PAUSE_SECONDS:
            self._course = hang_policy.without(self._course, paused)
            self._before = self._now = None
        self._course = hang_policy.advance(self._course, _sight(look))
        self._keep_now_and_then(look.now_seconds)
        if self._dump is not None:
            self._dump.look(look.now_seconds)
        if look.is_stop_asked or not look.has_leader:
            # A stop has a deadline of its own.
            self._be_fine()
            return None
        allowed = hang_policy.limit(self._policy, self._course)
        silent = look.now_seconds - self._course.since_seconds
        if hang_policy.degree(silent, allowed, moves=False) == "fine":
            self._be_fine()
            return None
        if not self._course.is_known:
            self._tell_if_quiet(look.now_seconds, allowed)
            return None
        return self._doubt(look, silent, allowed)

    def end(self) -> None:
        self._keep()

    def _doubt(self, look: Look, silent: float, allowed: Limit) -> Want:
        """Look closer at a silence that lasts."""
        now, apart_seconds = look.now_seconds, min(_SIGNS_SECONDS, allowed.seconds / 4)
        if self._now is None or now >= self._now.at_seconds + apart_seconds:
            self._now = _Used(now, read_signs(self._roots(look)))
            self._before = self._before or self._now
        if any(sign.process.process_id in self._roots(look)[:1] for sign in self._stopped()):
            # By job control or a debugger: nobody can tell how long. It begins anew when it is continued.
            self._course = hang_policy.without(self._course, silent)
            self._be_fine()
            return None
        was, self._degree = self._degree, hang_policy.degree(silent, allowed, moves=self._moves())
        if was == "fine":
            self._tell("slow", silent, allowed)
        is_looked_into = self._dump is not None and self._used()[0] >= apart_seconds
        if self._degree in ("suspect", "hung") and self._dump is None:
            self._dump = StackDump(self._started.directory, self._roots(look)[0], self._now.signs, now)
            self._tell("hang-suspected", silent, allowed)
        if self._degree == "hung" and is_looked_into and self._policy.is_enforced:
            self._course = hang_policy.ended(self._course)
            return EndNow(because=self._because(silent, allowed), kind="hang")
        return None

    def _roots(self, look: Look) -> list[int]:
        """Return the process that trains, if it is known, and the leader."""
        trainer = [look.beat.process_id] if look.beat is not None else []
        return [*trainer, self._started.leader]

    def _stopped(self) -> list[Signs]:
        return [sign for sign in self._now.signs if sign.process.state in "Tt"] if self._now else []

    def _moves(self) -> bool:
        """Tell whether the attempt clearly computes or reads since it was first found slow."""
        seconds, cpu_seconds, moved = self._used()
        return seconds > 0 and (
            cpu_seconds >= _MOVES_CORES * seconds or moved >= _MOVES_BYTES_PER_SECOND * seconds
        )

    def _used(self) -> tuple[float, float, int]:
        if self._before is None or self._now is None:
            return 0.0, 0.0, 0
        before, now = self._before, self._now
        return (
            now.at_seconds - before.at_seconds,
            max(0.0, now.cpu_seconds - before.cpu_seconds),
            max(0, now.moved_bytes - before.moved_bytes),
        )

    def _be_fine(self) -> None:
        if self._degree != "fine":
            self._records.event("moves-again", attempt=self._started.attempt)
            # A stop has shown its own reason meanwhile.
            if self._records.snapshot.reason == self._said:
                self._records.show(reason="")
        self._degree, self._before, self._now, self._dump = "fine", None, None, None

    def _tell(self, kind: str, silent: float, allowed: Limit) -> None:
        self._said = f"{_silence(self._course, silent)}; the limit is {_time(allowed.seconds)}"
        seconds, cpu_seconds, moved = self._used()
        self._records.event(
            kind,
            attempt=self._started.attempt,
            phase=self._course.phase,
            step=self._course.step,
            silent_seconds=round(silent, 1),
            limit_seconds=round(allowed.seconds, 1),
            usual_seconds=self._course.pace.usual_seconds,
            cpu_seconds=round(cpu_seconds, 2),
            moved_bytes=moved,
            over_seconds=round(seconds, 1),
            processes=[str(sign) for sign in self._now.signs] if self._now is not None else [],
        )
        self._records.show(reason=self._said)

    def _because(self, silent: float, allowed: Limit) -> str:
        seconds, cpu_seconds, moved = self._used()
        where = self._dump.where() if self._dump is not None else ""
        trainer = self._now.signs[0] if self._now is not None and self._now.signs else None
        parts = [
            f"{_silence(self._course, silent)}, at step {self._course.step}; "
            f"the limit is {_time(allowed.seconds)}",
            f"it stands in {where}" if where else "",
            f"its processes used {cpu_seconds:.1f} s of processor time and moved {moved} bytes "
            f"in the last {_time(seconds)}",
            str(trainer) if trainer is not None else "",
        ]
        return "; ".join(part for part in parts if part)

    def _tell_if_quiet(self, now: float, allowed: Limit) -> None:
        """Say once if a command that is not known to use the library is silent in its output, too."""
        if self._is_quiet_told or now < self._output_at + _OUTPUT_SECONDS:
            return
        self._output_at = now
        try:
            quiet = time.time() - (self._started.directory / layout.OUTPUT_LOG).stat().st_mtime
        except OSError:
            return
        if quiet >= allowed.seconds:
            self._is_quiet_told = True
            signs = read_signs([self._started.leader])
            self._records.event(
                "quiet",
                attempt=self._started.attempt,
                quiet_seconds=round(quiet, 1),
                cpu_seconds=round(sum(sign.cpu_seconds for sign in signs), 2),
                processes=[str(sign) for sign in signs],
            )

    def _keep_now_and_then(self, now: float) -> None:
        if now >= self._kept_at + _KEEP_SECONDS:
            self._kept_at = now
            self._keep()

    def _keep(self) -> None:
        pace = self._course.pace
        if pace == self._kept:
            return
        try:
            write_json(self._started.run_directory / layout.PACE_FILE, pace.to_json(), durable=False)
            self._kept = pace
        except StorageError as error:
            say(f"how fast the run goes could not be kept: {error.message}")


def _sight(look: Look) -> Sight:
    beat = look.beat
    if beat is None:
        return Sight(now_seconds=look.now_seconds)
    return Sight(
        now_seconds=look.now_seconds,
        beat_seconds=beat.monotonic_seconds,
        phase=beat.phase,
        step=beat.step,
        progress=beat.progress,
    )


def _silence(course: Course, silent: float) -> str:
    if course.phase == "training":
        usual = course.pace.usual_seconds
        return f"no step for {_time(silent)}" + (f" (usual {_time(usual)})" if usual is not None else "")
    longest = course.pace.longest.get(course.phase)
    known = f" (the longest so far was {_time(longest)})" if longest else ""
    return f"{course.phase} without progress for {_time(silent)}{known}"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
