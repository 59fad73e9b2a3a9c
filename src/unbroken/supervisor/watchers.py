"""All that watches the attempts of a run."""

from __future__ import annotations

from unbroken.supervisor.plan import Plan
from unbroken.supervisor.records import Records
from unbroken.supervisor.watcher import MakeWatcher


def makers(plan: Plan, records: Records) -> list[MakeWatcher]:
    """Return what makes the watchers of each attempt of `plan`, in the order in which they look."""
    return []
