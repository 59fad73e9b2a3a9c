"""Where a run goes on: choose the checkpoint, restore it, and say what was done."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unbroken.checkpoint.choosing import reason_against
from unbroken.checkpoint.highlights import non_finite_in_words
from unbroken.checkpoint.store import Checkpoint, CheckpointStore
from unbroken.errors import (
    CheckpointNotFoundError,
    DamagedError,
    NotARunError,
    NotFiniteError,
    StorageError,
    UnbrokenError,
    UnhealthyError,
    UsageError,
)
from unbroken.rundir import layout
from unbroken.rundir.files import read_json, write_json
from unbroken.rundir.rollbacks import Rollback, tainting
from unbroken.rundir.tell import tell
from unbroken.state.choices import matches
from unbroken.state.paths import name_of
from unbroken.training.read_back import READ_BACK_DAMAGED
from unbroken.training.report import died_of
from unbroken.training.restored import Restored

RESUME_MODES = ("auto", "never", "must")
# So many attempts may die while they restore a checkpoint; then an older one is tried.
MAX_DEATHS = 2
# What is set aside with these reasons was no loss: given up on purpose, or written once more.
_NOT_DAMAGED = ("tainted: ", "not finite: ", "not validated: ", "set aside: ", READ_BACK_DAMAGED)
_ASKED_TO_END = ("SIGTERM", "SIGINT", "SIGHUP")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint that was restored, every byte verified, and what had to be passed over to reach it.

    `later` gives the reason for each newer one that will be set aside when this one is restored; they
    are still in their places. `died` are the attempts that ended while they restored this one.
    """

    checkpoint: Checkpoint
    restored: Restored
    passed_over: dict[str, str]
    later: dict[str, str] = field(default_factory=dict)
    died: tuple[int, ...] = ()


def choose(store: CheckpointStore, resume: str, run_id: str, restoring: Restoring) -> Candidate | None:
    """Restore the checkpoint to go on from, and return it; None means: begin anew.

    With "auto" and "must" a damaged checkpoint goes to quarantine and the next older one is taken. One
    that two attempts died of is passed over, unless no older one is left; one that holds NaN, has failed the
    user's check, or is tainted by a roll-back always. A run whose checkpoints are all of no use never begins
    anew by itself, unless it is to go back to its very beginning.

    Raises:
        CheckpointNotFoundError: nothing there with "must", or no checkpoint of that name.
        DamagedError: there were checkpoints, and none is intact; or the named one is damaged.
        NotFiniteError: there are checkpoints, and none that is intact is finite.
        UnhealthyError: there are intact ones, and something else is known against each of them.
        NotARunError: a checkpoint of another run lies here.
        UsageError: "never" in a directory that has checkpoints.
    """
    names = store.names()
    if resume == "never":
        _check_empty(store, names)
        return None
    if resume not in RESUME_MODES:
        return _named(store, resume, run_id, restoring)
    search = _Search(store, run_id, restoring)
    found = search.newest(reversed(names), max_deaths=MAX_DEATHS - 1)
    if found is not None:
        later = {name: died_of(died) for name, died in search.suspects.items()}
        return replace(found, later=later | search.unfit_after(found.checkpoint.name))
    # Nothing else is left to go on from, so to pass them over would help nobody.
    found = search.newest(list(search.suspects), max_deaths=None)
    if found is not None:
        return replace(found, later=search.unfit_after(found.checkpoint.name))
    if search.is_all_tainted and restoring.goes_back_to_the_beginning():
        search.set_tainted_aside()
        return None
    if search.unfit:
        raise _nothing_good(store, search.unfit)
    _check_begin(store, resume, search.passed_over)
    return None


class _Search:
    """Looks for the newest checkpoint that can be restored, and sets aside what is damaged on the way.

    `suspects` are intact but were passed over, with the attempts that died of them; newest first.
    `unfit` were passed over for what their manifests say, `tainted` of these for a roll-back.
    """

    def __init__(self, store: CheckpointStore, run_id: str, restoring: Restoring) -> None:
        self.passed_over: dict[str, str] = {}
        self.suspects: dict[str, tuple[int, ...]] = {}
        self.unfit: dict[str, str] = {}
        self.tainted: list[str] = []
        self._store = store
        self._names = store.names()
        self._run_id = run_id
        self._restoring = restoring
        self._deaths = _deaths(restoring.run_directory)

    def newest(self, names: Iterable[str], *, max_deaths: int | None) -> Candidate | None:
        """Restore the first of `names` that is intact and that at most `max_deaths` attempts died of."""
        for name in names:
            try:
                checkpoint = self._store.get(name)
                _check_owner(checkpoint, self._run_id)
                if reason := self._restoring.reason_against(checkpoint):
                    self.unfit[name] = reason
                    self.tainted += [name] if self._restoring.taint(checkpoint) else []
                    continue
                died = self._deaths.get(_mark(checkpoint), ())
                if max_deaths is not None and len(died) > max_deaths:
                    self.suspects[name] = died
                    continue
                restored = self._restoring.do(checkpoint)
                return Candidate(checkpoint, restored, self.passed_over, died=died)
            except DamagedError as error:
                place = self._store.quarantine(name, error.message)
                self.passed_over[name] = f"{error.message}; now in {place}"
        return None

    @property
    def is_all_tainted(self) -> bool:
        """Whether all checkpoints were given up in roll-backs."""
        return len(self.tainted) == len(self._names)

    def set_tainted_aside(self) -> None:
        """Move those to quarantine: their steps will be counted again."""
        for name in self.tainted:
            self._store.quarantine(name, self.unfit[name])

    def unfit_after(self, name: str) -> dict[str, str]:
        """Return those that are newer than the checkpoint `name`: steps will be counted again from there."""
        newer = self._names[self._names.index(name) + 1 :]
        return {found: reason for found, reason in self.unfit.items() if found in newer}


class Restoring:
    """Restores checkpoints by `act`, and leaves a record of it in case this process dies of that.

    `non_finite` are patterns of the names of tensors that may hold NaN or infinity, `rollbacks` those of
    the run.
    """

    def __init__(
        self,
        attempt_directory: Path,
        act: Callable[[Checkpoint], Restored],
        non_finite: Sequence[str] = (),
        rollbacks: Sequence[Rollback] = (),
    ) -> None:
        self._non_finite = tuple(non_finite)
        self._rollbacks = tuple(rollbacks)
        self.run_directory = attempt_directory.parents[1]
        self._record = attempt_directory / layout.RESTORING_FILE
        self._act = act

    def blown_up(self, checkpoint: Checkpoint) -> dict[str, int]:
        """Return what in `checkpoint` is not finite and should be."""
        found = checkpoint.manifest.non_finite or {}
        return {path: count for path, count in found.items() if not matches(name_of(path), self._non_finite)}

    def reason_against(self, checkpoint: Checkpoint) -> str | None:
        """Return why a run may not go on from `checkpoint` by itself, or None."""
        return reason_against(checkpoint.manifest, self._rollbacks, non_finite=self._non_finite)

    def taint(self, checkpoint: Checkpoint) -> Rollback | None:
        """Return the roll-back that `checkpoint` is tainted by, or None."""
        return tainting(self._rollbacks, step=checkpoint.step, earlier=checkpoint.manifest.rollbacks)

    def goes_back_to_the_beginning(self) -> bool:
        """Tell whether a run without a good checkpoint begins anew, for it was rolled back so far.

        What was set aside before must not have been damaged.
        """
        if not self._rollbacks or self._rollbacks[-1].trusted_step > 0:
            return False
        set_aside = (self.run_directory / layout.QUARANTINE).glob(f"*/{layout.QUARANTINE_REASON}")
        reasons = [str((_record(path) or {}).get("reason")) for path in set_aside]
        return all(reason.startswith(_NOT_DAMAGED) for reason in reasons)

    def do(self, checkpoint: Checkpoint) -> Restored:
        """Return what `act` returns. If the process dies in it, the record of that stays behind.

        An exception is no death: it shows what is wrong, and the script may be to blame for it.
        """
        name, created = _mark(checkpoint)
        write_json(self._record, {"checkpoint": name, "created": created})
        try:
            found = self._act(checkpoint)
        except BaseException as error:
            self._record.unlink(missing_ok=True)
            if not isinstance(error, UnbrokenError):
                error.add_note(f"while {name} was restored")
            raise
        # Something can be restored: what this and earlier attempts died of is settled.
        for number in layout.attempts(self.run_directory):
            place = layout.attempt_directory(self.run_directory, number)
            (place / layout.RESTORING_FILE).unlink(missing_ok=True)
        return found


def _mark(checkpoint: Checkpoint) -> tuple[str, str]:
    # The name alone would not do: steps that are counted again give it to another checkpoint.
    return checkpoint.name, checkpoint.manifest.created


def _deaths(run_directory: Path) -> dict[tuple[str, str], tuple[int, ...]]:
    """Return which attempts died while they restored a checkpoint, by its name and time."""
    found: dict[tuple[str, str], tuple[int, ...]] = {}
    for number in layout.attempts(run_directory):
        attempt = layout.attempt_directory(run_directory, number)
        record = _record(attempt / layout.RESTORING_FILE)
        # Who was asked to end did not die of what it was restoring.
        if record and (_record(attempt / layout.EXIT_FILE) or {}).get("signal") not in _ASKED_TO_END:
            mark = (str(record.get("checkpoint")), str(record.get("created")))
            found[mark] = (*found.get(mark, ()), number)
    return found


def _record(path: Path) -> dict[str, Any] | None:
    try:
        return read_json(path)
    except StorageError:
        # Bytes that cannot be read accuse no checkpoint in particular.
        return None


def _nothing_good(store: CheckpointStore, found: Mapping[str, str]) -> UnbrokenError:
    name, reason = next(iter(found.items()))
    by_hand = f"to go on from one all the same, start the script by itself with resume={name!r}; or begin"
    if reason.startswith("not finite"):
        return NotFiniteError(
            f"{store.storage}: expected a checkpoint to go on from, found {len(found)} that are not finite; "
            f"{name} is {reason}",
            hint="if they belong there, name the tensors by non_finite= of Run, for example "
            f"non_finite=['model.mask']; {by_hand} anew in another run directory",
        )
    return UnhealthyError(
        f"{store.storage}: expected a checkpoint to go on from, found {len(found)} that something is known "
        f"against; {name} is {reason}",
        hint=f"{by_hand} anew in another run directory; keep more checkpoints, or save more often, to be "
        "able to go back farther",
    )


def _check_empty(store: CheckpointStore, names: Sequence[str]) -> None:
    if names:
        raise UsageError(
            f"{store.storage}: expected no checkpoints with resume='never', found {len(names)}",
            hint="choose a new run directory, or resume='auto' to go on from the newest",
        )


def _check_begin(store: CheckpointStore, resume: str, passed_over: Mapping[str, str]) -> None:
    """Raise unless a run without any intact checkpoint may begin anew."""
    set_aside = store.storage.list(layout.QUARANTINE)
    if set_aside:
        reason = next(iter(passed_over.values()), "see reason.json in each")
        raise DamagedError(
            f"{store.storage}: expected an intact checkpoint, found {len(set_aside)} damaged ones in "
            f"{layout.QUARANTINE}/ and no other ({reason})",
            hint="repair or restore one from a copy, or begin anew in another run directory",
        )
    if resume == "must":
        raise CheckpointNotFoundError(
            f"{store.storage}: expected a checkpoint with resume='must', found none",
            hint="check the run directory, or use resume='auto' to begin anew",
        )


def _named(store: CheckpointStore, name: str, run_id: str, restoring: Restoring) -> Candidate:
    if os.environ.get(layout.ATTEMPT_VARIABLE) is not None:
        raise UsageError(
            f"Run: expected resume='auto' or 'must' under `unbroken run`, found {name!r}",
            hint="every restart would go back to it: run the script by itself once, then like this",
        )
    checkpoint = store.get(name)
    _check_owner(checkpoint, run_id)
    names = store.names()
    if blown_up := restoring.blown_up(checkpoint):
        tell(
            f"{name} holds {non_finite_in_words(blown_up)}: nothing but its name makes a run go on from it",
            "if they belong there, name them by non_finite= of Run, or what is saved from here is no better",
        )
    elif reason := restoring.reason_against(checkpoint):
        tell(f"{name} is {reason}; nothing but its name makes a run go on from it")
    reason = f"set aside: the run was continued from {name} on request"
    later = dict.fromkeys(names[names.index(name) + 1 :], reason)
    return Candidate(checkpoint, restoring.do(checkpoint), {}, later)


def set_later_aside(store: CheckpointStore, candidate: Candidate) -> None:
    """Move the checkpoints that were given up to quarantine, once the restore has succeeded.

    Steps will be counted again from here, and would meet their names.
    """
    for name, reason in candidate.later.items():
        candidate.passed_over[name] = f"{reason}; now in {store.quarantine(name, reason)}"


def _check_owner(checkpoint: Checkpoint, run_id: str) -> None:
    if checkpoint.manifest.run_id != run_id:
        raise NotARunError(
            f"{checkpoint.storage}: expected checkpoints of run {run_id}, "
            f"found {checkpoint.name} of run {checkpoint.manifest.run_id}",
            hint="to move a run, copy its whole directory with run.json into an empty place",
        )
