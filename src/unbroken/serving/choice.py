"""Which checkpoint of a run to serve next. Reads the run directory, and writes nothing into it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unbroken.checkpoint.choosing import best_first, facts_of, reason_against, tainted_by
from unbroken.checkpoint.reader import read_manifest
from unbroken.checkpoint.retention import CheckpointFacts, KeepBest
from unbroken.checkpoint.store import Checkpoint, CheckpointStore
from unbroken.errors import CheckpointError, StorageError
from unbroken.rundir import layout
from unbroken.rundir.identity import read_run
from unbroken.rundir.rollbacks import Rollback, read_rollbacks
from unbroken.rundir.tell import tell


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint, and the bytes of its seal: names are given again after a roll-back, seals never."""

    checkpoint: Checkpoint
    seal: bytes


class Choice:
    """Looks for what is better than what is served: newer, or by `best` better.

    `problem` says why the first choice of the last look could not be served, or is None.
    """

    def __init__(self, directory: Path, best: KeepBest | None, non_finite: Sequence[str]) -> None:
        self.problem: str | None = None
        self.directory = directory
        self._store = CheckpointStore(directory)
        self._best = best
        self._non_finite = tuple(non_finite)
        # By seals: what is not to be served, which stays so; what the others are rated by; what was told.
        self._refused: set[bytes] = set()
        self._rated: dict[bytes, CheckpointFacts] = {}
        self._withdrawn: set[bytes] = set()

    def next(self, served: Candidate | None) -> Candidate | None:
        """Return the checkpoint to serve in the place of `served`, or None if that is to stay.

        Raises StorageError, NotARunError, FormatVersionError, DamagedError if the run cannot be read.
        """
        run = read_run(self.directory)
        run_id = None if run is None else run.run_id
        rollbacks = read_rollbacks(self.directory)
        is_kept = served is not None and self._is_still_good(served, run_id, rollbacks)
        return self._next(served if is_kept else None, run_id, rollbacks)

    def is_there(self, candidate: Candidate) -> bool:
        """Tell whether the run still has this checkpoint in its place."""
        return self._seal(candidate.checkpoint.name) == candidate.seal

    def is_good(self, candidate: Candidate) -> bool:
        """Tell whether the run was not rolled back from this checkpoint meanwhile."""
        manifest = candidate.checkpoint.manifest
        return tainted_by(manifest.step, manifest.rollbacks, read_rollbacks(self.directory)) is None

    def refuse(self, candidate: Candidate, reason: str) -> None:
        """Never return this checkpoint again, and say why."""
        self._refuse(candidate.checkpoint.name, candidate.seal, reason)

    def say_waiting(self) -> None:
        """Tell people that there is nothing to serve, if nothing else was told."""
        if self.problem is None:
            metric = "" if self._best is None else f" with the metric {self._best.metric}"
            self.say(f"waiting for a good checkpoint{metric}")

    def say(self, problem: str) -> None:
        """Tell people of a problem, once as long as it stays the same."""
        if problem != self.problem:
            tell(f"{self.directory}: {problem}")
        self.problem = problem

    def _refuse(self, name: str, seal: bytes, reason: str) -> None:
        if seal not in self._refused:
            self._refused.add(seal)
            self.say(f"{name} is passed over: {reason}")

    def _next(
        self, kept: Candidate | None, run_id: str | None, rollbacks: Sequence[Rollback]
    ) -> Candidate | None:
        names = self._store.names()
        better = _newer(names, kept) if self._best is None else self._rank(names, kept, run_id, rollbacks)
        found = (self._good(name, run_id, rollbacks) for name in better)
        return next((candidate for candidate in found if candidate is not None), None)

    def _rank(
        self,
        names: Sequence[str],
        kept: Candidate | None,
        run_id: str | None,
        rollbacks: Sequence[Rollback],
    ) -> list[str]:
        """Return those of `names` that are better than what is kept, the best first."""
        assert self._best is not None
        there: dict[str, str] = {}
        rated: dict[bytes, CheckpointFacts] = {}
        for name in names:
            seal = self._seal(name)
            found = None if seal in self._rated else self._good(name, run_id, rollbacks)
            if found is not None:
                self._rated[found.seal] = facts_of(found.seal.hex(), found.checkpoint.manifest)
            if seal is not None and seal in self._rated:
                there[seal.hex()], rated[seal] = name, self._rated[seal]
        # What has been pruned need not be remembered.
        self._rated = dict(rated)
        if kept is not None:
            rated[kept.seal] = facts_of(kept.seal.hex(), kept.checkpoint.manifest)
        ranking = best_first([*rated.values()], self._best)
        if kept is not None and kept.seal.hex() in ranking:
            ranking = ranking[: ranking.index(kept.seal.hex())]
        return [there[key] for key in ranking]

    def _good(self, name: str, run_id: str | None, rollbacks: Sequence[Rollback]) -> Candidate | None:
        """Return the checkpoint `name` if nothing is known against it."""
        seal = self._seal(name)
        if seal is None or seal in self._refused:
            return None
        storage = self._store.storage
        try:
            manifest = read_manifest(storage, f"{layout.CHECKPOINTS}/{name}")
        except CheckpointError as error:
            # Pruned since it was listed, it is not damaged.
            if self._seal(name) == seal:
                self._refuse(name, seal, error.message)
            return None
        against = reason_against(manifest, rollbacks, non_finite=self._non_finite)
        if run_id is not None and manifest.run_id != run_id:
            against = f"it belongs to run {manifest.run_id}"
        if against is None:
            return Candidate(Checkpoint(storage, name, manifest), seal)
        self._refuse(name, seal, against)
        return None

    def _is_still_good(self, served: Candidate, run_id: str | None, rollbacks: Sequence[Rollback]) -> bool:
        manifest, name = served.checkpoint.manifest, served.checkpoint.name
        against = tainted_by(manifest.step, manifest.rollbacks, rollbacks)
        if run_id is not None and manifest.run_id != run_id:
            against = "its directory is that of another run now"
        elif against is None and self._is_set_aside(served):
            against = "the run has set it aside"
        if against is not None and served.seal not in self._withdrawn:
            self._withdrawn.add(served.seal)
            self.say(f"{name}, which is served, is to be replaced: {against}")
        return against is None

    def _is_set_aside(self, served: Candidate) -> bool:
        """Tell of a checkpoint that is not in its place whether that is because it was not good."""
        if self.is_there(served):
            return False
        name = served.checkpoint.name
        places = [place for place in self._store.storage.list(layout.QUARANTINE) if place.startswith(name)]
        return any(self._seal(name, f"{layout.QUARANTINE}/{place}") == served.seal for place in places)

    def _seal(self, name: str, place: str = layout.CHECKPOINTS) -> bytes | None:
        with suppress(StorageError):
            return bytes(self._store.storage.read(f"{place}/{name}/{layout.MANIFEST_DIGEST}"))
        return b"" if name in self._store.storage.list(place) else None


def _newer(names: Sequence[str], kept: Candidate | None) -> list[str]:
    """Return those of `names`, oldest first, that are newer than what is kept, the newest first."""
    after = (-1, 0) if kept is None else _order(kept.checkpoint.name)
    return [name for name in reversed(names) if _order(name) > after]


def _order(name: str) -> tuple[int, int]:
    order = layout.parse_checkpoint_name(name)
    assert order is not None, f"not a checkpoint name: {name}"
    return order
