"""Where a run goes on: choose the checkpoint, restore it, and say what was done."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unbroken.checkpoint.highlights import learning_rates
from unbroken.checkpoint.store import Checkpoint, CheckpointStore
from unbroken.errors import (
    CheckpointNotFoundError,
    DamagedError,
    NotARunError,
    UsageError,
)
from unbroken.rundir import layout
from unbroken.state.tensors import HostTensor

RESUME_MODES = ("auto", "never", "must")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint whose every byte was verified, and what had to be passed over to reach it.

    `later` are newer ones that the user gave up by naming this one; still in their places.
    """

    checkpoint: Checkpoint
    tensors: dict[str, HostTensor]
    passed_over: dict[str, str]
    later: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """What was restored; `passed_over` gives the reason for each newer checkpoint that was not.

    `changed` lists what differs in environment and config since the checkpoint, a line each.
    """

    checkpoint: str
    step: int
    epoch: int
    inside_epoch: bool
    parts: tuple[str, ...]
    tensors: int
    size_bytes: int
    learning_rates: tuple[float, ...]
    passed_over: dict[str, str]
    changed: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return the report for people, a line each."""
        where = f"inside epoch {self.epoch}" if self.inside_epoch else f"before epoch {self.epoch}"
        lines = [f"resumed from {self.checkpoint} (step {self.step}, {where})"]
        lines += [f"{name} was passed over: {reason}" for name, reason in self.passed_over.items()]
        lines.append(
            f"{', '.join(self.parts)}: {self.tensors} tensors, {self.size_bytes:,} bytes, "
            "read back and equal bit for bit"
        )
        if self.learning_rates:
            lines.append("learning rate " + ", ".join(f"{rate:g}" for rate in self.learning_rates))
        return lines + [f"changed since: {line}" for line in self.changed]


def choose(store: CheckpointStore, resume: str, run_id: str) -> Candidate | None:
    """Return the checkpoint to go on from, all its bytes read and verified; None means: begin anew.

    With "auto" and "must" a damaged checkpoint goes to quarantine and the next older one is taken. A
    run whose checkpoints are all damaged never begins anew by itself.

    Raises:
        CheckpointNotFoundError: nothing there with "must", or no checkpoint of that name.
        DamagedError: there were checkpoints, and none is intact; or the named one is damaged.
        NotARunError: a checkpoint of another run lies here.
        UsageError: "never" in a directory that has checkpoints.
    """
    names = store.names()
    if resume == "never":
        if names:
            raise UsageError(
                f"{store.storage}: expected no checkpoints with resume='never', found {len(names)}",
                hint="choose a new run directory, or resume='auto' to go on from the newest",
            )
        return None
    if resume not in RESUME_MODES:
        return _named(store, resume, run_id)
    passed_over: dict[str, str] = {}
    for name in reversed(names):
        try:
            checkpoint = store.get(name)
            _check_owner(checkpoint, run_id)
            return Candidate(checkpoint, checkpoint.load_tensors(), passed_over)
        except DamagedError as error:
            passed_over[name] = f"{error.message}; now in {store.quarantine(name, error.message)}"
    _check_begin(store, resume, passed_over)
    return None


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


def _named(store: CheckpointStore, name: str, run_id: str) -> Candidate:
    if os.environ.get(layout.ATTEMPT_VARIABLE) is not None:
        raise UsageError(
            f"Run: expected resume='auto' or 'must' under `unbroken run`, found {name!r}",
            hint="every restart would go back to it: run the script by itself once, then like this",
        )
    checkpoint = store.get(name)
    _check_owner(checkpoint, run_id)
    names = store.names()
    later = tuple(names[names.index(name) + 1 :])
    return Candidate(checkpoint, checkpoint.load_tensors(), {}, later)


def set_later_aside(store: CheckpointStore, candidate: Candidate) -> None:
    """Move the checkpoints that were given up to quarantine, once the restore has succeeded.

    Steps will be counted again from here, and would meet their names.
    """
    for name in candidate.later:
        reason = f"set aside: the run was continued from {candidate.checkpoint.name} on request"
        candidate.passed_over[name] = f"{reason}; now in {store.quarantine(name, reason)}"


def _check_owner(checkpoint: Checkpoint, run_id: str) -> None:
    if checkpoint.manifest.run_id != run_id:
        raise NotARunError(
            f"{checkpoint.storage}: expected checkpoints of run {run_id}, "
            f"found {checkpoint.name} of run {checkpoint.manifest.run_id}",
            hint="to move a run, copy its whole directory with run.json into an empty place",
        )


def report(
    candidate: Candidate,
    *,
    environment: Mapping[str, Any],
    config: Any,
    parts: Sequence[str],
    settings: Sequence[str],
) -> RestoreReport:
    """Return the report on a restored checkpoint.

    `environment` and `config` are those of now, encoded; `settings` says what the checkpoint overwrote.
    """
    manifest = candidate.checkpoint.manifest
    return RestoreReport(
        checkpoint=candidate.checkpoint.name,
        step=manifest.step,
        epoch=manifest.position.epoch,
        inside_epoch=manifest.position.inside_epoch,
        parts=tuple(parts),
        tensors=len(manifest.tensors),
        size_bytes=manifest.size_bytes,
        learning_rates=learning_rates(entry.state for entry in manifest.parts.values()),
        passed_over=candidate.passed_over,
        changed=(
            *settings,
            *_changes("", manifest.environment, environment),
            *_changes("config", manifest.config, config),
        ),
    )


def _changes(where: str, then: Any, now: Any) -> list[str]:
    if isinstance(then, dict) and isinstance(now, dict):
        lines = []
        for key in sorted({*then, *now}):
            inner = f"{where}.{key}" if where else str(key)
            lines += _changes(inner, then.get(key, "absent"), now.get(key, "absent"))
        return lines
    return [] if then == now else [f"{where}: {then!r} -> {now!r}"]
