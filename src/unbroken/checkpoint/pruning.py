"""Pruning a storage: what is known of its checkpoints, what a plan makes of it, and the deletion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from unbroken.checkpoint.choosing import facts_of
from unbroken.checkpoint.manifest import Manifest
from unbroken.checkpoint.pins import held, read_pins
from unbroken.checkpoint.reader import read_manifest
from unbroken.checkpoint.retention import (
    CheckpointFacts,
    RetentionPlan,
    RetentionPolicy,
    newest_to_go_on_from,
    plan_retention,
)
from unbroken.errors import CheckpointError, StorageError, UnbrokenError
from unbroken.rundir import layout
from unbroken.storage.base import Storage

# The one reason for which a plan is blocked that goes away by itself.
PINS_ARE_BEING_CHANGED = "pins are being changed at this moment"


@dataclass(frozen=True, slots=True)
class _Known:
    run_id: str
    facts: CheckpointFacts


@dataclass(frozen=True, slots=True)
class _Found:
    """The checkpoints there are, oldest first; for those that are not ours to judge, why."""

    ours: list[CheckpointFacts] = field(default_factory=list)
    foreign: dict[str, str] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)


class Pruner:
    """Plans and prunes the checkpoints of one storage.

    A committed checkpoint never changes, so each manifest is read once and what matters of it kept.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._known: dict[str, _Known] = {}

    def learn(self, name: str, manifest: Manifest) -> None:
        """Take note of a checkpoint that was committed just now."""
        self._known[name] = _Known(manifest.run_id, facts_of(name, manifest))

    def plan(
        self,
        names: Sequence[str],
        policies: Sequence[RetentionPolicy],
        *,
        run_id: str | None,
        is_intact: Callable[[str], bool] | None,
    ) -> RetentionPlan:
        """Return what to keep and prune of `names`, oldest first; see `CheckpointStore.plan_prune`."""
        found = self._look(names, run_id)
        try:
            pinned = {name: str(pin) for name, pin in read_pins(self._storage).items()}
        except UnbrokenError as error:
            reason = _pins_unknown(error)
            return RetentionPlan(kept=dict.fromkeys(names, reason), pruned={}, blocked=reason)
        plan = plan_retention(found.ours, policies, protected=pinned)
        plan = replace(plan, kept=_in_order({**found.foreign, **found.unreadable, **plan.kept}))
        doubt = _doubt(found, is_intact) if plan.pruned else None
        return plan if doubt is None else _all_kept(plan, doubt)

    def prune(self, plan: RetentionPlan) -> RetentionPlan:
        """Delete what `plan` says and return what was done."""
        if not plan.pruned:
            return plan
        with held(self._storage, wait=False) as is_held:
            if not is_held:
                return _all_kept(plan, PINS_ARE_BEING_CHANGED)
            try:
                pins = read_pins(self._storage)
            except UnbrokenError as error:
                return _all_kept(plan, _pins_unknown(error))
            # Planning may have taken minutes, to verify the newest checkpoint.
            since = {name: str(pins[name]) for name in plan.pruned if name in pins}
            plan = RetentionPlan(
                kept=_in_order({**plan.kept, **since}),
                pruned={name: reason for name, reason in plan.pruned.items() if name not in since},
            )
            for name in plan.pruned:
                self._storage.delete(f"{layout.CHECKPOINTS}/{name}")
        return plan

    def _look(self, names: Sequence[str], run_id: str | None) -> _Found:
        there = set(names)
        self._known = {name: known for name, known in self._known.items() if name in there}
        found = _Found()
        for name in names:
            try:
                known = self._read(name)
            except (CheckpointError, StorageError) as error:
                found.unreadable[name] = f"cannot be read: {error.message}"
                continue
            if run_id is not None and known.run_id != run_id:
                found.foreign[name] = f"belongs to run {known.run_id}"
            else:
                found.ours.append(known.facts)
        return found

    def _read(self, name: str) -> _Known:
        if name not in self._known:
            self.learn(name, read_manifest(self._storage, f"{layout.CHECKPOINTS}/{name}"))
        return self._known[name]


def _doubt(found: _Found, is_intact: Callable[[str], bool] | None) -> str | None:
    """Return why the newest to go on from may not be good: then an older one may be the last good one."""
    newest = newest_to_go_on_from(found.ours).name
    for name, problem in found.unreadable.items():
        if _order(name) > _order(newest):
            return f"{name}, the newest, {problem}"
    if is_intact is not None and not is_intact(newest):
        return f"{newest}, the newest to go on from, is damaged"
    return None


def _pins_unknown(error: UnbrokenError) -> str:
    return f"which checkpoints are pinned is not known: {error.message}"


def _all_kept(plan: RetentionPlan, reason: str) -> RetentionPlan:
    spared = dict.fromkeys(plan.pruned, reason)
    return RetentionPlan(kept=_in_order({**plan.kept, **spared}), pruned={}, blocked=reason)


def _in_order(reasons: dict[str, str]) -> dict[str, str]:
    return dict(sorted(reasons.items(), key=lambda item: _order(item[0])))


def _order(name: str) -> tuple[int, int]:
    order = layout.parse_checkpoint_name(name)
    assert order is not None, f"not a checkpoint name: {name}"
    return order
