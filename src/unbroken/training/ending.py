"""How a run ends: completed, stopped with the state saved, or failed. The last state, the last words."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from unbroken.checkpoint.ranks import of_rank
from unbroken.checkpoint.store import CheckpointStore
from unbroken.errors import SaveFailedError, StorageFullError
from unbroken.rundir.control import can_still_save, read_stop
from unbroken.rundir.last_words import LastWords
from unbroken.rundir.tell import tell
from unbroken.training.attempt import Attempt
from unbroken.training.full_disk import FullDisk
from unbroken.training.preemption import StopRequested
from unbroken.training.ranks.following import wait_on_all
from unbroken.training.ranks.group import Group
from unbroken.training.saver import Saver
from unbroken.training.saves import Saves
from unbroken.training.whole_state import WholeState


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The three ways out of a run; `beat(phase)` shows them in the heartbeat."""

    attempt: Attempt
    state: WholeState
    saver: Saver
    saves: Saves
    full_disk: FullDisk
    beat: Callable[[str], None]
    group: Group

    def stop(self, reason: str) -> NoReturn:
        """Save, and leave the loop by StopRequested; without a save if that cannot end in time."""
        self.beat("stopping")
        self._leave_unsaved_if_late(reason)
        self._save()
        self._say("stopped", reason)
        # No rank is gone before the first one has said why: whoever started them would end it.
        self.group.told(None)
        self.attempt.tell(f"stopped by {reason} at step {self.state.step}, saved in {self.saver.newest_name}")
        raise StopRequested(reason)

    def _leave_unsaved_if_late(self, reason: str) -> None:
        kept, save_seconds = self.saver.newest_name, self.attempt.heartbeat.save_seconds
        stop = self.attempt.run_directory
        if self.group.decided(lambda: can_still_save(read_stop(stop), save_seconds, time.time())):
            return
        why = f"{reason}; not saved at step {self.state.step}, for a save takes {save_seconds:.1f} s"
        # What is saved is what the words are about: the step of the newest checkpoint.
        self._say("stopped", why, step=max(0, self.saver.newest_step))
        self.group.told(None)
        self.attempt.tell(f"stopped by {why}; {kept} stays the newest")
        raise StopRequested(reason)

    def leave(self, reason: str) -> NoReturn:
        """Leave by StopRequested with what is kept from before the evaluation that this cuts short."""
        self.beat("stopping")
        if self.saver.has_newer_copy:
            self._leave_unsaved_if_late(reason)
        self.saver.write_copy()
        self._say("stopped", reason)
        kept = self.saver.newest_name
        where = f"saved in {kept}" if kept is not None else "there was nothing to save yet"
        self.attempt.tell(f"stopped by {reason} between two steps, at step {self.state.step}, {where}")
        raise StopRequested(reason)

    def complete(self) -> None:
        """Save what the loop ended with."""
        self.beat("saving")
        try:
            self.group.votes("at the end, after step", self.state.step)
            self._save()
        except BaseException as error:
            self.attempt.say_failed(error, self.state.step, self.saver.newest_name)
            raise
        self.beat("done")
        self._say("completed", "the training loop ended")
        self.attempt.tell(f"completed at step {self.state.step}, saved in {self.saver.newest_name}")
        self.full_disk.tell_given_up()

    def fail(self, error: BaseException) -> None:
        """Make a checkpoint of the newest snapshot; the state of now is what `error` made of it."""
        try:
            # Another copy may be of long ago: it was made for a stop.
            write = self.saver.write_left if self.saver.keeps_snapshots else self.saver.wait
            write()
        except SaveFailedError as failed:
            # What left the block is the news.
            error.add_note(f"and {failed.message}")
        self.attempt.say_failed(error, self.state.step, self.saver.newest_name)

    def _save(self) -> None:
        """Commit the state of now, unless the newest checkpoint holds exactly this one."""
        if self._is_to_be_saved():
            self.saves.save(*self.state.progress())
        # No rank leaves before it is written: whoever started them would end the others.
        wait_on_all(self.group, self.saver)

    def _is_to_be_saved(self) -> bool:
        def newest() -> str | None:
            self.saver.wait()
            return self.saver.newest_name

        name = self.group.decided(newest)
        if name is None:
            return True

        def is_kept() -> bool:
            checkpoint = CheckpointStore(self.attempt.run_directory).get(name)
            return self.state.is_as_in(of_rank(checkpoint, self.group.rank).manifest)

        return not all(self.group.gathered(self.group.attempted(is_kept)))

    def _say(self, ending: Any, reason: str, *, step: int | None = None) -> None:
        words = LastWords(
            ending=ending,
            step=self.state.step if step is None else step,
            checkpoint=self.saver.newest_name,
            reason=reason,
        )
        try:
            self.full_disk.write(lambda: self.attempt.say(words), "the last words")
        except StorageFullError as error:
            # The state is saved, and that is what counts.
            tell(f"the last words could not be written: {error.message}")
