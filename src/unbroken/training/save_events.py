"""What is told of saves: events in the journal, alarms, and why a state that was saved is not good."""

from __future__ import annotations

from unbroken.errors import StorageFullError
from unbroken.handover.committer import Committed
from unbroken.rundir.tell import tell
from unbroken.training.attempt import Attempt
from unbroken.training.full_disk import FullDisk


class SaveEvents:
    """Tells of saves on behalf of `attempt`; on a full disk it is the telling that is given up."""

    def __init__(self, attempt: Attempt, full_disk: FullDisk) -> None:
        self._attempt = attempt
        self._full_disk = full_disk

    def note(self, kind: str, **fields: object) -> None:
        """Add an event to the journal, durably."""
        try:
            self._attempt.journal.append(kind, **fields)
            self._attempt.journal.sync()
        except StorageFullError as error:
            # The checkpoint is what counts; the journal is for people.
            self._full_disk.lose(error, f"the event {kind!r}")

    def alarm(self, what: str, text: str, hint: str) -> None:
        """Tell people of something that is not well; see `Attempt.alarm`."""
        try:
            self._attempt.alarm(what, text, hint)
        except StorageFullError as error:
            self._full_disk.lose(error, f"the alarm {what!r}")

    def bad_state(self, bad: Committed) -> None:
        """Say that a state is not good: nothing goes on from it."""
        if bad.not_finite:
            self.note("not-finite", checkpoint=bad.name, found=bad.not_finite)
            tell(
                f"{bad.name} holds {bad.not_finite}: it is kept as evidence, and never resumed from",
                "stop and look for the cause; a restart goes on from the newest checkpoint that is finite. "
                "If they belong there, name them by non_finite= of Run",
            )
        if bad.invalid:
            self.note("not-valid", checkpoint=bad.name, found=bad.invalid)
            self.alarm(
                "validation",
                f"{bad.name} failed its validation ({bad.invalid}): it is kept as evidence, and never "
                "resumed from",
                "stop and look for the cause; a restart goes on from the newest checkpoint that is good",
            )
