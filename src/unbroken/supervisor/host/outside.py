"""What is known from outside the run: that its machine is taken away, or that its job's time is over.

It is looked at while an attempt runs, and between two attempts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from unbroken.errors import StorageError
from unbroken.rundir.control import StopRequest, can_still_save, request_save
from unbroken.supervisor.grace import last_save_seconds
from unbroken.supervisor.host import slurm
from unbroken.supervisor.host.endings import Ending, time_to_stop
from unbroken.supervisor.host.notices.choose import make_provider, provider_by_firmware
from unbroken.supervisor.plan import Plan
from unbroken.supervisor.records import Records, say
from unbroken.supervisor.stopping import StopWatch
from unbroken.supervisor.watcher import AskToStop, Look, Started, Want, Watcher

if TYPE_CHECKING:
    from unbroken.supervisor.host.notices.base import Notice
    from unbroken.supervisor.host.notices.watch import NoticeWatch

URL_VARIABLE = "UNBROKEN_METADATA_URL"
# The time in the notice of a cloud is not to be used to the last; that of a batch system is.
_AFTER_NOTICE_SECONDS = 300.0


class Outside:
    """Tells the run of `plan` when to stop for what happens outside of it.

    Made while the supervisor has no children, and with signals blocked.
    """

    def __init__(self, plan: Plan, records: Records, environment: Mapping[str, str] = os.environ) -> None:
        self._plan = plan
        self._records = records
        self._save_seconds = last_save_seconds(plan.directory)
        # What is announced, with the end that it means, as long as no stop was asked for it.
        self._announced: dict[Notice, Ending | None] = {}
        self._notices = watch_of(plan.notices, environment)
        self._job_ending = self._end_of_job(environment)
        if self._notices is not None:
            self._notices.start()
            records.event("notices-watched", provider=self._notices.name)

    def watcher(self, started: Started) -> Watcher:
        """Return what looks at it while the attempt `started` runs."""
        return _Watcher(self)

    def ask(self, stop: StopWatch) -> None:
        """Ask by `stop`, if it is time for it: between two attempts nobody else does."""
        wanted = self.look()
        if wanted is not None:
            stop.ask(wanted.reason, wanted.seconds, is_preemption=wanted.is_preemption)

    def look(self, save_seconds: float | None = None) -> AskToStop | None:
        """Return the request to stop, once it is time for it; `save_seconds` is how long a save took last."""
        self._save_seconds = save_seconds or self._save_seconds
        if self._notices is not None:
            self._listen(self._notices)
        for notice, ending in self._announced.items():
            seconds = self._time_to_stop(ending)
            if ending is not None and seconds is not None:
                self._announced[notice] = None
                return self._ask(ending, seconds)
        ending, seconds = self._job_ending, self._time_to_stop(self._job_ending)
        if ending is not None and seconds is not None:
            self._job_ending = None
            return self._ask(ending, seconds)
        return None

    def _end_of_job(self, environment: Mapping[str, str]) -> Ending | None:
        job = slurm.job_id(environment)
        try:
            at = slurm.end_seconds(environment)
        except ValueError as error:
            self._records.event("job-end-unknown", job=job, reason=str(error))
            return None
        if at is None:
            return None
        self._records.event("job-end-known", job=job, ends=at)
        now = time.time()
        return Ending(who="Slurm", what=f"job {job} ends", at_seconds=at, known_seconds=now, lead_seconds=0.0)

    def _time_to_stop(self, ending: Ending | None) -> float | None:
        if ending is None:
            return None
        return time_to_stop(
            ending,
            now_seconds=time.time(),
            save_seconds=self._save_seconds,
            grace_seconds=self._plan.grace_seconds,
        )

    def _listen(self, notices: NoticeWatch) -> None:
        """Take what is new, and forget what is announced no more: a machine may be left to us after all."""
        standing = notices.standing
        for notice in [notice for notice in self._announced if notice not in standing]:
            del self._announced[notice]
            self._records.event("notice-withdrawn", provider=notices.name, what=notice.what)
        for notice in standing:
            if notice not in self._announced:
                self._announced[notice] = self._taken(notice, notices.name)
        for trouble in notices.troubles():
            self._records.event("notices-not-seen", reason=trouble)

    def _taken(self, notice: Notice, who: str) -> Ending | None:
        now = time.time()
        at = notice.at_seconds
        if at is None and notice.within_seconds is not None:
            at = now + notice.within_seconds
        self._records.event("notice", provider=who, what=notice.what, at=at, is_end=notice.kind == "end")
        if notice.kind == "risk":
            self._save_now()
            return None
        assert at is not None, "the end of a machine has a time"
        return Ending(
            who=who, what=notice.what, at_seconds=at, known_seconds=now, lead_seconds=_AFTER_NOTICE_SECONDS
        )

    def _save_now(self) -> None:
        try:
            request_save(self._plan.directory)
        except StorageError as error:
            say(f"a checkpoint could not be asked for: {error.message}")

    def _ask(self, ending: Ending, seconds: float) -> AskToStop:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ending.at_seconds))
        reason = f"preemption: {ending.who}: {ending.what} at {at}"
        now = time.time()
        request = StopRequest(reason=reason, deadline_seconds=now + seconds, is_preemption=True)
        can_save = can_still_save(request, self._save_seconds, now)
        self._records.event(
            "preemption",
            who=ending.who,
            what=ending.what,
            at=ending.at_seconds,
            seconds_left=round(seconds, 3),
            save_seconds=round(self._save_seconds, 3),
            can_save=can_save,
        )
        return AskToStop(reason=reason, seconds=seconds, is_preemption=True)


class _Watcher:
    def __init__(self, outside: Outside) -> None:
        self._outside = outside

    def look(self, look: Look) -> Want:
        return self._outside.look(look.beat.save_seconds if look.beat is not None else None)

    def end(self) -> None:
        pass


def watch_of(wanted: str, environment: Mapping[str, str]) -> NoticeWatch | None:
    """Return what watches the notices of the cloud that `wanted` names, or None if there are none."""
    name = provider_by_firmware() if wanted == "auto" else wanted
    if name is None or name == "off":
        return None
    # Loaded where there is a cloud to listen to: the supervisor stays small elsewhere.
    from unbroken.supervisor.host.notices.watch import NoticeWatch

    return NoticeWatch(make_provider(name), environment.get(URL_VARIABLE))
