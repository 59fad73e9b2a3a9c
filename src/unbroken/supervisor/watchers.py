"""All that watches the attempts of a run."""

from __future__ import annotations

from unbroken.supervisor.alarms import alarm_watch
from unbroken.supervisor.grace import grace_watch
from unbroken.supervisor.hangs.watchdog import watchdog
from unbroken.supervisor.job_control import job_control_watch
from unbroken.supervisor.missed_saves import SaveWatch
from unbroken.supervisor.plan import Plan
from unbroken.supervisor.records import Records
from unbroken.supervisor.resources.watch import Resources
from unbroken.supervisor.side.output_keeping import OutputKeeping
from unbroken.supervisor.watcher import MakeWatcher


def makers(plan: Plan, records: Records) -> list[MakeWatcher]:
    """Return what makes the watchers of each attempt of `plan`, in the order in which they look."""
    return [
        job_control_watch(records),
        grace_watch(plan.grace_seconds, records),
        Resources(plan.directory, records),
        OutputKeeping(limit_bytes=plan.log_limit_bytes, records=records),
        SaveWatch(records=records),
        alarm_watch(records),
        watchdog(plan.hang, records),
    ]
