"""The weights of one checkpoint as a file for use: chosen, held against their digests, written at once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from unbroken.checkpoint.choosing import best_first, facts_of, reason_against
from unbroken.checkpoint.container import plan_shard
from unbroken.checkpoint.digest import seal
from unbroken.checkpoint.envelope import read_manifest_bytes
from unbroken.checkpoint.highlights import plain_metrics
from unbroken.checkpoint.listing import list_names
from unbroken.checkpoint.manifest import Manifest
from unbroken.checkpoint.reader import read_manifest
from unbroken.checkpoint.retention import KeepBest
from unbroken.checkpoint.weights import PartWeights, weights_in
from unbroken.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedError,
    StorageError,
    UsageError,
)
from unbroken.inspection.conversion import METADATA, UnreadTensor, check_name, file_chunks
from unbroken.inspection.formats.ours import OurCheckpoint
from unbroken.inspection.locate import Located, locate_all, locate_in_run
from unbroken.rundir.identity import RunIdentity, read_run
from unbroken.rundir.journal import finite
from unbroken.rundir.rollbacks import Rollback, read_rollbacks
from unbroken.storage.local import LocalStorage

# Each but the last has met with a checkpoint that was pruned meanwhile.
_LOOKS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What was written to `file`, of which `checkpoint`.

    `tied` gives each name that is not in the file the name of the tensor that it stands for. `dropped` has
    a line for each thing that could not be written, `passed_over` the reason for each checkpoint that would
    have come first or cannot be read, and `against` says what is known against the one that was asked for by
    its name.
    """

    file: Path
    checkpoint: str
    step: int
    metrics: dict[str, float]
    part: str
    tensors: int
    size_bytes: int
    tied: dict[str, str]
    dropped: tuple[str, ...]
    passed_over: dict[str, str]
    against: str | None


def export(
    directory: Path,
    target: Path,
    *,
    name: str | None = None,
    best: KeepBest | None = None,
    part: str | None = None,
    replace: bool = False,
) -> Export:
    """Write the weights of the module `part` in a checkpoint of a run to the safetensors file `target`.

    The checkpoint is the one called `name`, or the best by `best`, or the newest. Unless it is called by its
    name it is finite, validated and not tainted, and where it is damaged the next one is taken.

    Raises:
        UsageError: `target` is no such name, or is there already and may not be replaced; no module `part`.
        CheckpointNotFoundError: the run has no checkpoint that is fit for use.
        DamagedError: the checkpoint `name` is damaged, or all are; nothing is written.
    """
    check_name(target)
    if not replace and (target.exists() or target.is_symlink()):
        raise UsageError(f"{target}: exists already", hint="to put the new weights in its place, say so")
    if name is not None:
        located = locate_in_run(directory, name)
        found = _Found(located, read_manifest(located.storage, located.tree))
        return _write(_Choice(directory), found, target, part)
    for _ in range(_LOOKS):
        choice = _Choice(directory)
        for found in choice.in_order(best):
            try:
                return _write(choice, found, target, part)
            except (DamagedError, StorageError) as error:
                choice.failed(found.located, error)
        # Where something was pruned while it was read, the run has what is newer.
        if not choice.has_gone:
            break
    raise choice.nothing()


@dataclass(frozen=True, slots=True)
class _Found:
    located: Located
    manifest: Manifest

    @property
    def name(self) -> str:
        return self.located.directory.name


@dataclass(slots=True)
class _Choice:
    """Chooses among the checkpoints of a run, and notes what is passed over."""

    directory: Path
    passed_over: dict[str, str] = field(default_factory=dict)
    damaged: DamagedError | None = None
    has_gone: bool = False
    run: RunIdentity | None = field(init=False)
    rollbacks: tuple[Rollback, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.run = read_run(self.directory)
        self.rollbacks = read_rollbacks(self.directory)

    def in_order(self, best: KeepBest | None) -> Iterator[_Found]:
        """Yield the checkpoints that nothing is known against, the best or the newest first."""
        for found in self._readable() if best is None else self._rated(best):
            against = self.against(found.manifest)
            if against is None:
                yield found
            else:
                self.passed_over[found.name] = against

    def failed(self, located: Located, error: CheckpointError | StorageError) -> None:
        """Note what is wrong with a checkpoint. Raises `error` if that is none of the checkpoint's."""
        if located.directory.name not in list_names(located.storage):
            self.has_gone = True
            return
        if isinstance(error, StorageError):
            raise error
        if isinstance(error, DamagedError):
            self.damaged = self.damaged or error
        self.passed_over[located.directory.name] = error.message

    def against(self, manifest: Manifest) -> str | None:
        """Return what is known against a checkpoint."""
        if self.run is not None and manifest.run_id != self.run.run_id:
            return f"it belongs to run {manifest.run_id}"
        return reason_against(manifest, self.rollbacks)

    def nothing(self) -> CheckpointError:
        """Return the error for a run of which nothing can be exported."""
        if self.damaged is not None:
            return self.damaged
        bad = "".join(f"; {name} is {reason}" for name, reason in [*self.passed_over.items()][:1])
        return CheckpointNotFoundError(
            f"{self.directory}: expected a checkpoint that is fit for use, found none{bad}",
            hint="to export one all the same, give its name" if bad else "let the run save once",
        )

    def _rated(self, best: KeepBest) -> list[_Found]:
        found = {one.name: one for one in self._readable()}
        rated = best_first([facts_of(name, one.manifest) for name, one in reversed(found.items())], best)
        if found and not rated:
            known = sorted({metric for one in found.values() for metric in one.manifest.metrics})
            raise UsageError(
                f"{self.directory}: expected a checkpoint with the metric {best.metric!r}, "
                f"found {', '.join(known) or 'none with metrics'}",
                hint="metrics are what the script gives to run.record and run.step",
            )
        return [found[name] for name in rated]

    def _readable(self) -> Iterator[_Found]:
        for located in reversed(locate_all(self.directory)):
            try:
                yield _Found(located, read_manifest(located.storage, located.tree))
            except (CheckpointError, StorageError) as error:
                self.failed(located, error)


def _write(choice: _Choice, found: _Found, target: Path, part: str | None) -> Export:
    reader = OurCheckpoint(found.located)
    weights = weights_in(found.manifest, part)
    stored = {
        name: UnreadTensor(reader, path)
        for name, path in weights.paths.items()
        if name not in weights.tied and name != METADATA
    }
    told = _told(choice, found, weights, stored)
    # Other libraries look for tied weights as they stand here.
    plan = plan_shard(target.name, stored, {**weights.tied, **told})
    # One tensor at a time is read, and held against its digest; one that is not what was saved leaves
    # what stood here before.
    LocalStorage(target.absolute().parent).write(target.name, file_chunks(plan, stored))
    return Export(
        file=target,
        checkpoint=found.name,
        step=found.manifest.step,
        metrics=plain_metrics(found.manifest.metrics),
        part=weights.part,
        tensors=len(stored),
        size_bytes=plan.size_bytes,
        tied=weights.tied,
        dropped=tuple(_dropped(weights, told)),
        passed_over=choice.passed_over,
        against=choice.against(found.manifest),
    )


def _told(choice: _Choice, found: _Found, weights: PartWeights, stored: Iterable[str]) -> dict[str, str]:
    """Return the metadata of the file: what it is of, for programs and for people."""
    manifest, located = found.manifest, found.located
    entries = manifest.tensors
    facts = {
        "run": choice.directory.name if choice.run is None else choice.run.name,
        "run_id": manifest.run_id,
        "checkpoint": found.name,
        "step": str(manifest.step),
        "part": weights.part,
        "type": manifest.parts[weights.part].type,
        "created": manifest.created,
        "metrics": json.dumps(finite(plain_metrics(manifest.metrics))),
        "manifest_digest": seal(read_manifest_bytes(located.storage, located.tree)),
        "digests": json.dumps(
            {name: f"{manifest.digest_algorithm}:{entries[weights.paths[name]].digest}" for name in stored}
        ),
    }
    # Other libraries ask for the first of these.
    return {"format": "pt", **{f"unbroken.{key}": value for key, value in facts.items()}}


def _dropped(weights: PartWeights, told: Iterable[str]) -> Iterator[str]:
    if METADATA in weights.paths:
        yield f"tensor {METADATA}: in safetensors this name means something else"
    for name in sorted(weights.tied.keys() & told):
        yield f"{name}, a further name of {weights.tied[name]}: in the metadata it means something else"
    for name in weights.others:
        yield f"{name}: it is no tensor"
