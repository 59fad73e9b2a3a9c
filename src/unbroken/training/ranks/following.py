"""The further ranks: the first one opens the run, chooses the checkpoint and writes; they follow it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unbroken.checkpoint.snapshot import Description
from unbroken.checkpoint.store import Checkpoint, CheckpointStore
from unbroken.errors import DamagedError, StateMismatchError, UnbrokenError, UsageError
from unbroken.rundir.identity import RunIdentity, read_run
from unbroken.state.table import TensorTable
from unbroken.training.attempt import Attempt, FollowingAttempt
from unbroken.training.ranks.group import Group
from unbroken.training.restored import Restored
from unbroken.training.saver import Saver


@dataclass(frozen=True, slots=True)
class _Opened:
    run: RunIdentity
    number: int


def open_attempt(directory: Path, group: Group) -> Attempt:
    """Return this rank's side of an attempt: the first one's holds the run. All raise what that raises."""
    held: list[Attempt] = []

    def open_first() -> _Opened:
        held.append(Attempt(directory))
        return _Opened(held[0].run, held[0].number)

    opened = group.decided(open_first)
    _check_same_run(group, opened, directory)
    return held[0] if held else FollowingAttempt(directory, group.rank, opened.number, opened.run)


def _check_same_run(group: Group, opened: _Opened, directory: Path) -> None:
    def check() -> None:
        found = read_run(directory)
        if found != opened.run:
            raise StateMismatchError(
                f"Run: expected the directory of run {opened.run.run_id} on every rank, found "
                f"{'none' if found is None else found.run_id}",
                hint="give every rank the same directory, on a file system that they share",
            )

    group.attempted(check)


def check_same_parts(group: Group, names: Sequence[str]) -> None:
    """Raise UsageError on all ranks unless each has the same parts."""
    found = group.gathered(list(names))
    for rank, other in enumerate(found):
        if other != found[0]:
            differ = ", ".join(sorted(set(found[0]) ^ set(other))) or "their order"
            raise UsageError(
                f"Run: expected the same parts on every rank, found that rank {rank} and rank 0 differ: "
                f"{differ}",
                hint="pass all of them on every rank: what one alone has could not be restored",
            )


def wait_on_all(group: Group, saver: Saver) -> None:
    """Wait on all ranks until the last checkpoint is written; see `Saver.wait_for_the_last`."""

    def wait() -> tuple[str | None, int]:
        saver.wait_for_the_last()
        return saver.newest_name, saver.newest_step

    name, step = group.decided(wait)
    if isinstance(saver, FollowingSaver):
        saver.note(name, step)


class FollowingSaver(Saver):
    """Writes nothing: what this rank has goes into the checkpoints of the first one."""

    def __init__(self) -> None:
        self._kept: tuple[str, int] | None = None

    @property
    def newest_name(self) -> str | None:
        return None if self._kept is None else self._kept[0]

    @property
    def newest_step(self) -> int:
        return -1 if self._kept is None else self._kept[1]

    @property
    def keeps_snapshots(self) -> bool:
        return False

    @property
    def paused_seconds(self) -> float:
        return 0.0

    @property
    def is_writing(self) -> bool:
        return False

    @property
    def has_failed(self) -> bool:
        return False

    @property
    def has_newer_copy(self) -> bool:
        return False

    def newest(self) -> Checkpoint | None:
        return None

    def begin_from(self, checkpoint: Checkpoint) -> None:
        self.note(checkpoint.name, checkpoint.step)

    def note(self, name: str | None, step: int) -> None:
        """Take over what the first rank has written last."""
        self._kept = None if name is None else (name, step)

    def prepare(self, table: TensorTable) -> None:
        """Nothing is copied here."""

    def save(self, description: Description, table: TensorTable, *, began: float | None = None) -> None:
        """The first rank has been given what belongs to it by now."""

    def snapshot(self, description: Description, table: TensorTable) -> bool:
        return False

    def raise_failure(self) -> None:
        """It is raised on the first rank."""

    def wait(self) -> bool:
        return True

    def wait_for_the_last(self) -> None:
        """The first rank waits."""

    def write_copy(self) -> None:
        """There is none."""

    def write_left(self) -> bool:
        return True

    def forget_copies(self) -> None:
        """There are none."""

    def close(self) -> None:
        """Nothing was opened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """What the first rank tells the others: to restore this checkpoint, or, without one, that it is over."""

    name: str | None = None
    created: str = ""
    error: Exception | None = None


def restored_on_all(
    group: Group, restore: Callable[[Checkpoint], Restored]
) -> Callable[[Checkpoint], Restored]:
    """Return a `restore` for the first rank that has all others restore the same checkpoint, too.

    It succeeds if all do. Whichever cannot read the checkpoint, it is damaged for all of them.
    """
    if group.is_alone:
        return restore

    def act(checkpoint: Checkpoint) -> Restored:
        group.told(_Order(name=checkpoint.name, created=checkpoint.manifest.created))
        return group.attempted(lambda: restore(checkpoint))

    return act


def follow(
    group: Group, store: CheckpointStore, restore: Callable[[Checkpoint], Restored]
) -> tuple[Checkpoint, Restored] | None:
    """Restore what the first rank does, one after the other until it is done; None: the run begins anew."""
    last: tuple[Checkpoint, Restored] | None = None
    while True:
        order: Any = group.told(None)
        if order.error is not None:
            raise order.error
        if order.name is None:
            return last

        def act(order: _Order = order) -> tuple[Checkpoint, Restored]:
            checkpoint = _same(store, order)
            return checkpoint, restore(checkpoint)

        try:
            last = group.attempted(act)
        except UnbrokenError:
            # The first rank takes another one, or says that there is none.
            last = None


def led(group: Group, choose: Callable[[], Any]) -> Any:
    """Return what `choose` returns to the first rank; tell the others that it is done, or what it raised."""
    try:
        found = choose()
    except UnbrokenError as error:
        if not group.is_alone:
            group.told(_Order(error=error))
        raise
    if not group.is_alone:
        group.told(_Order())
    return found


def _same(store: CheckpointStore, order: _Order) -> Checkpoint:
    assert order.name is not None
    checkpoint = store.get(order.name)
    # Steps that are counted again give its name to another checkpoint.
    if checkpoint.manifest.created != order.created:
        raise DamagedError(
            f"{order.name}: expected the checkpoint of {order.created}, found that of "
            f"{checkpoint.manifest.created}",
            hint="the ranks see different file systems, or an old copy of one: mount the same one on all",
        )
    return checkpoint
