"""The runs of a rehearsal: references that nobody disturbs, one that is killed and resumed, and trials."""

from __future__ import annotations

import glob
import shutil
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import msgspec

from unbroken.drill.causes import Suspect
from unbroken.drill.comparison import Divergence
from unbroken.drill.plans import next_kill
from unbroken.drill.process import Ended, Folders, UnplannedEndError, judged, run_process
from unbroken.drill.stages import Stage
from unbroken.rundir.rehearsal import Kill, Line, Plan, read_value, values_key

# Returns the first difference of the lines of processes from the reference.
Compare = Callable[[Sequence[Sequence[Line]]], Divergence | None]


class Progress(Protocol):
    """Is told how a rehearsal goes on."""

    def begin(self, phase: str) -> None:
        """Say that a phase begins."""

    def steps(self, count: int) -> None:
        """Say how many steps its process has made."""

    def end(self, what: str) -> None:
        """Say what became of the phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KilledRun:
    """A run that was killed as planned, as far as it came.

    `missed` are the kills whose moment never came, `failure` is what a process ended with otherwise. `bad`
    is the process of the divergence, and `before` a copy of the run directory as it found it.
    """

    processes: tuple[Ended, ...]
    missed: tuple[Kill, ...]
    divergence: Divergence | None
    failure: UnplannedEndError | None
    before: Path | None

    @property
    def bad(self) -> Ended:
        assert self.divergence is not None, "asked only where there is one"
        return self.processes[self.divergence.process]


class Rehearsal:
    """Runs the script of `stage` again and again, all below the directory `root`."""

    def __init__(self, stage: Stage, root: Path, *, timeout_seconds: float, progress: Progress) -> None:
        self._stage = stage
        self._root = root
        self._folders = Folders(root / "processes")
        # The first reference, by which a resume of an observed script is placed.
        self._reference: Ended | None = None
        self._timeout_seconds = timeout_seconds
        self._progress = progress
        self._not_put_back: dict[str, None] = {}

    @property
    def not_put_back(self) -> tuple[str, ...]:
        """What could not be put back in some trial, in words."""
        return tuple(self._not_put_back)

    def reference(
        self, name: str, steps: int, environment: Mapping[str, str] | None = None
    ) -> tuple[Line, ...]:
        """Run the script for `steps` steps, or fewer if it ends before, and leave it alone.

        Raises UnplannedEndError if it fails, UsageError if it has written down no step.
        """
        self._progress.begin(name)
        directory = self._root / name.replace(" ", "-")
        self._stage.set_up(directory)
        ended = self._run(self._plan(directory, steps), environment)
        judged(ended)
        if not ended.lines:
            raise self._stage.without_steps()
        self._reference = self._reference or ended
        self._progress.end(f"{ended.reached} steps in {ended.seconds:.1f} s")
        return ended.lines

    def killed(
        self,
        kills: Sequence[Kill],
        save_at: tuple[int, ...],
        *,
        steps: int,
        compare: Compare,
    ) -> KilledRun:
        """Kill and resume one run as planned until it has made `steps` steps."""
        killed = _Killing(kills)
        directory = self._root / "killed"
        self._stage.set_up(directory)
        while not killed.is_complete:
            kill = killed.next(steps)
            copy = self._root / f"before-{len(killed.processes)}"
            if killed.divergence is None:
                self._stage.copy(directory, copy)
            self._progress.begin(_phase(kill, len(killed.processes)))
            plan = msgspec.structs.replace(self._plan(directory, steps), save_at=save_at, kill=kill)
            ended = self._run(plan, before=killed.processes)
            try:
                # A run that died when all steps were done may have none left.
                end = judged(ended, steps=None if killed.reached >= steps else steps)
            except UnplannedEndError as failure:
                self._progress.end(failure.what)
                return killed.result(copy, failure)
            self._progress.end(_outcome(ended, end))
            if end == "not-reached" and killed.divergence is None:
                killed.miss(ended)
                self._stage.copy(copy, directory)
            else:
                killed.add(ended, end, compare)
            if killed.divergence is None:
                shutil.rmtree(copy, ignore_errors=True)
        diverged = killed.divergence
        return killed.result(None if diverged is None else self._root / f"before-{diverged.process}")

    def values_at(self, step: int) -> Path:
        """Return the directory that holds the values which a reference had at `step`."""
        self._progress.begin(f"values of step {step}")
        values = self._root / "values"
        directory = self._root / "values-run"
        self._stage.set_up(directory)
        plan = self._plan(directory, step + 1)
        self._run(msgspec.structs.replace(plan, values=str(values), dump_at=(step,)))
        self._progress.end("written")
        return values

    def kinds(self, values: Path, step: int, found: Sequence[Suspect]) -> tuple[Suspect, ...]:
        """Return `found` with the kinds of objects that are in no part, as their values tell."""
        return tuple(
            replace(one, kind=_kind(values, values_key(step, one.name))) if one.is_in_no_part else one
            for one in found
        )

    def trial(
        self, killed: KilledRun, values: Path, *, steps: int, compare: Compare
    ) -> Callable[[Sequence[Suspect]], bool]:
        """Return what tells whether the resume that went wrong goes right with these suspects put back."""
        directory = self._root / "killed"
        shutil.move(directory, self._root / "killed-as-it-ended")
        before = killed.processes[: killed.processes.index(killed.bad)]

        def is_right_with(found: Sequence[Suspect]) -> bool:
            self._progress.begin(f"put back: {', '.join(one.name for one in found) or 'nothing'}")
            assert killed.before is not None, "only a run that diverged has trials"
            self._stage.copy(killed.before, directory)
            plan = msgspec.structs.replace(
                killed.bad.plan,
                kill=None,
                values=str(values),
                put_back=tuple(name for one in found for name in one.components),
                put_back_at=killed.bad.began_at,
            )
            ended = self._run(plan, before=before)
            try:
                judged(ended, steps=steps)
            except UnplannedEndError as failure:
                # With a part of another run's state a script may fail; that proves nothing.
                self._progress.end(failure.what)
                return False
            self._not_put_back |= dict.fromkeys(note for line in ended.lines for note in line.notes)
            diverged = compare([ended.lines])
            self._progress.end("bit-identical" if diverged is None else f"differs at step {diverged.step}")
            return diverged is None

        return is_right_with

    def _plan(self, directory: Path, steps: int) -> Plan:
        return Plan(directory=str(directory), record="", steps=steps)

    def _run(
        self, plan: Plan, environment: Mapping[str, str] | None = None, *, before: Sequence[Ended] = ()
    ) -> Ended:
        """Run one process of the script by `plan`, after those `before` in the same directory."""
        folder, stage, reference = self._folders.new(), self._stage, self._reference
        known = reference.lines if reference is not None else ()
        is_resumed = stage.is_resumed(known, [ended.lines for ended in before])
        record = Path(reference.plan.record) if before and reference is not None else None
        return run_process(
            stage.command(Path(plan.directory), is_resumed=is_resumed),
            msgspec.structs.replace(
                plan, record=str(folder / "record.jsonl"), observed=stage.observed(record)
            ),
            folder,
            environment={**stage.environment, **(environment or {})},
            timeout_seconds=self._timeout_seconds,
            watch=self._progress.steps,
        )


class _Killing:
    """How far a run that is killed again and again has come."""

    def __init__(self, kills: Sequence[Kill]) -> None:
        self._pending = deque(kills)
        self._current: Kill | None = None
        self.processes: list[Ended] = []
        self.missed: list[Kill] = []
        self.divergence: Divergence | None = None
        self.is_complete = False

    @property
    def reached(self) -> int:
        return max((ended.reached for ended in self.processes), default=0)

    def next(self, steps: int) -> Kill | None:
        """Return the kill of the next process, None if it is to complete."""
        self._current = None
        while self._pending and self._current is None:
            wanted = self._pending.popleft()
            self._current = next_kill(wanted, self.reached, steps)
            if self._current is None:
                self.missed.append(wanted)
        return self._current

    def miss(self, ended: Ended) -> None:
        """Take note that the moment did not come; the same step has another, which always comes."""
        kill = ended.plan.kill
        assert kill is not None, "only a kill can be missed"
        self.missed.append(kill)
        if kill.moment != "after-step":
            self._pending.appendleft(msgspec.structs.replace(kill, moment="after-step"))

    def add(self, ended: Ended, end: str, compare: Compare) -> None:
        """Take note of a process, and of the first difference."""
        self.processes.append(ended)
        self.is_complete = end != "killed"
        if self.divergence is None:
            self.divergence = compare([process.lines for process in self.processes])

    def result(self, before: Path | None, failure: UnplannedEndError | None = None) -> KilledRun:
        return KilledRun(
            processes=tuple(self.processes),
            missed=tuple(self.missed),
            divergence=self.divergence,
            failure=failure,
            before=before,
        )


def _kind(values: Path, key: str) -> str | None:
    for path in (values / key, *values.glob(f"*/{glob.escape(key)}")):
        if path.is_file():
            state = read_value(path)[0].state
            if isinstance(state, dict):
                kind = state.get("kind")
                return kind if isinstance(kind, str) and "." in kind else None
            return type(state).__name__ if isinstance(state, bool | int | float | str) else None
    return None


def _phase(kill: Kill | None, processes: int) -> str:
    doing = "first process" if processes == 0 else f"resume {processes}"
    return doing if kill is None else f"{doing}, {kill.signal} {kill.moment} {kill.step}"


def _outcome(ended: Ended, end: str) -> str:
    began = f"from step {ended.began_at}" if ended.began_at else "from the beginning"
    words = {"killed": "killed", "complete": "complete", "not-reached": "that moment never came"}
    return f"{began} to {ended.reached}, {words[end]}"
