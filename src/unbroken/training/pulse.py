"""What the heartbeat shows of a run: its phase, its progress, its waiting for data, its goal."""

from __future__ import annotations

from unbroken.rundir.heartbeat import Heartbeat
from unbroken.training.passes import Pass
from unbroken.training.saver import Saver
from unbroken.training.whole_state import WholeState


class Pulse:
    """Writes the heartbeat of the run with that `state`.

    The phase is "restoring", "training", "evaluating", "saving", "stopping", "done" or "disk-full". From
    the end of a loop over batches to the next batch of one that takes steps it is "evaluating", whatever
    the script does meanwhile.
    """

    def __init__(self, heartbeat: Heartbeat, state: WholeState, saver: Saver) -> None:
        self._heartbeat = heartbeat
        self._state = state
        self._saver = saver
        self._epochs = 0
        self.phase = "startup"

    def beat(self, phase: str) -> None:
        """Say that the run is alive in `phase`."""
        self.phase = phase
        if phase == "done" and self._heartbeat.goal_step:
            # Data that was left out was counted, and a loop may end early.
            self._heartbeat.goal_step = self._state.step
        self._heartbeat.beat(phase=phase, step=self._state.step, checkpoint_step=self._saver.newest_step)

    def step(self) -> None:
        """Note that a step is complete."""
        self._heartbeat.progress += 1
        self.beat("training")

    def batch(self, found: Pass, waited_seconds: float, *, trains: bool) -> None:
        """Note that a pass has handed out a batch, for training or for something else."""
        heartbeat = self._heartbeat
        heartbeat.progress += 1
        if not trains:
            self.beat("evaluating")
            return
        heartbeat.waited_seconds += waited_seconds
        # Now and then: asking for a length and dividing costs more than a beat.
        if self._epochs and not found.delivered & (found.delivered - 1) and found.used:
            batches = self._epochs * _length(found.slot.loader)
            heartbeat.goal_step = round(batches * found.steps / found.used)
        self.beat("training")

    def begin_epoch(self, epoch: int, count: int, *, is_resumed: bool) -> None:
        """Note that `epoch` of `count` begins, or goes on if it `is_resumed`."""
        is_known = bool(epoch) and not is_resumed
        if is_known:
            # The steps of whole epochs tell better than the first batches of one.
            self._heartbeat.goal_step = round(count * self._state.step / epoch)
        self._epochs = 0 if is_known else count


def _length(loader: object) -> int:
    try:
        return len(loader)  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001 - a length of the user's own, asked for only to show it, must not end training
        return 0
