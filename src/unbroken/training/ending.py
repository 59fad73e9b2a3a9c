"""How a run ends: completed, stopped with the state saved, or failed. The last state, the last words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from unbroken.errors import SaveFailedError, StorageFullError
from unbroken.rundir.last_words import LastWords
from unbroken.rundir.tell import tell
from unbroken.training.attempt import Attempt
from unbroken.training.full_disk import FullDisk
from unbroken.training.preemption import StopRequested
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

    def stop(self, reason: str) -> NoReturn:
        """Save, and leave the loop by StopRequested."""
        self.beat("stopping")
        self._save()
        self._say("stopped", reason)
        tell(f"stopped by {reason} at step {self.state.step}, saved in {self.saver.newest_name}")
        raise StopRequested(reason)

    def complete(self) -> None:
        """Save what the loop ended with."""
        try:
            self._save()
        except BaseException as error:
            self.attempt.say_failed(error, self.state.step, self.saver.newest_name)
            raise
        self.beat("done")
        self._say("completed", "the training loop ended")
        tell(f"completed at step {self.state.step}, saved in {self.saver.newest_name}")
        self.full_disk.tell_given_up()

    def fail(self, error: BaseException) -> None:
        """Make a checkpoint of the newest snapshot; the state of now is what `error` made of it."""
        try:
            self.saver.write_left()
        except SaveFailedError as failed:
            # What left the block is the news.
            error.add_note(f"and {failed.message}")
        self.attempt.say_failed(error, self.state.step, self.saver.newest_name)

    def _save(self) -> None:
        """Commit the state of now, unless the newest checkpoint holds exactly this one."""
        self.saver.wait()
        checkpoint = self.saver.newest()
        if checkpoint is None or not self.state.is_as_in(checkpoint.manifest):
            self.saves.save(*self.state.progress())
        self.saver.wait_for_the_last()

    def _say(self, ending: Any, reason: str) -> None:
        checkpoint = self.saver.newest_name
        words = LastWords(ending=ending, step=self.state.step, checkpoint=checkpoint, reason=reason)
        try:
            self.full_disk.write(lambda: self.attempt.say(words), "the last words")
        except StorageFullError as error:
            # The state is saved, and that is what counts.
            tell(f"the last words could not be written: {error.message}")
