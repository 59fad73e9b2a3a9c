"""What is done beside supervision, by a process of its own: telling people, compressing closed outputs."""

from __future__ import annotations

from functools import partial

from unbroken.supervisor.plan import Plan
from unbroken.supervisor.records import Records
from unbroken.supervisor.side.errands import Errands
from unbroken.supervisor.side.notifications import Notifications, is_notification, on_report
from unbroken.supervisor.side.output_keeping import closed_outputs
from unbroken.supervisor.watcher import Look, Started, Want

_WAIT_AT_THE_END_SECONDS = 3.0


class SideWork:
    """The side work for the run of `plan`. Made, and `prepare` called, only while no attempt runs."""

    def __init__(self, plan: Plan, records: Records) -> None:
        self._directory = plan.directory
        self._errands = Errands(
            plan.directory,
            on_report=partial(on_report, records),
            on_lost=lambda: records.event("side-process-lost"),
        )
        self._notifications = Notifications(plan.notify, records, self._errands, plan.directory)
        self.prepare()

    def prepare(self) -> None:
        """See to it that there is somebody to send notifications, and compress what is closed."""
        outputs = closed_outputs(self._directory)
        if outputs or self._notifications.has_targets:
            self._errands.start()
        for output in outputs:
            self._errands.hand({"errand": "compress", "path": str(output)})

    def watcher(self, _: Started) -> SideWork:
        return self

    def look(self, _: Look) -> Want:
        self._errands.look()
        return None

    def end(self) -> None:
        """The attempt ended: nothing of ours ends with it."""

    def finish(self) -> None:
        """Let what is under way go on without us, but for a moment in which notifications may succeed."""
        self._errands.close(wait_seconds=_WAIT_AT_THE_END_SECONDS, wait_for=is_notification)
