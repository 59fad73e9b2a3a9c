"""Starting a supervisor that nobody looks at: in a unit of the user's service manager, or by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unbroken.supervisor.host import systemd
from unbroken.supervisor.launch import NoReportError, await_report, start, supervisor_command
from unbroken.supervisor.plan import Plan, read_plan


def start_in_background(plan: Plan) -> str:
    """Start the supervisor of `plan`, and return what should be known about where it runs, or nothing."""
    return _start(plan.directory, plan, plan.grace_seconds)[1]


def revive_in_background(directory: Path) -> tuple[str, str]:
    """Start a supervisor that takes over the run in `directory`; return what it found, and as above.

    Raises NotRunningError if the run ended and is not to go on by itself.
    """
    plan = read_plan(directory)
    report, said = _start(directory, None, plan.grace_seconds if plan is not None else 0.0)
    return str(report.get("found", "")), said


def _start(directory: Path, plan: Plan | None, grace_seconds: float) -> tuple[dict[str, Any], str]:
    command = supervisor_command(directory, takes_over=plan is None)
    is_answered = systemd.answers()
    if is_answered and systemd.is_lingering():
        # The manager starts the same command once more after the supervisor was killed.
        restartable = supervisor_command(directory, takes_over=True)
        in_a_unit = systemd.in_a_unit(directory, restartable, grace_seconds=grace_seconds)
        client = start(directory, in_a_unit)
        try:
            report = await_report(client, plan)
        except NoReportError as error:
            # As long as an earlier unit of that name is not gone, say.
            return await_report(start(directory, command), plan), f"not in a unit of systemd: {error.message}"
        # It would wait for the end of the unit, which needs it no more.
        client.kill()
        client.wait()
        return report, f"unit {systemd.unit_name(directory)}"
    report = await_report(start(directory, command), plan)
    if is_answered:
        return report, (
            "it may end with your last login, as lingering is off; "
            f"`loginctl enable-linger {systemd.user()}` turns it on"
        )
    return report, ""
