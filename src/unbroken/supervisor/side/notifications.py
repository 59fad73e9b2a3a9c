"""Telling people what happens to a run: to webhooks, commands and services, which are never waited for."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unbroken.errors import UsageError
from unbroken.rundir.journal import OVER
from unbroken.supervisor.records import Records, say
from unbroken.supervisor.side.errands import Errands

NOTIFY_VARIABLE = "UNBROKEN_NOTIFY"
_COMMAND = "cmd:"
_AT_THE_END = {"done": "done", "stopped": "stopped", "hold": "held", "hand-over": "handed-over"}
_ROLL_BACK = "roll-back"
_OUT_OF_MEMORY = ("memory", "device-memory")
# So a notice fits into what webhooks of chats accept.
_LONGEST_TEXT = 1500


def parse_target(target: str) -> tuple[str, Any]:
    """Return the kind of errand that reaches `target`, and to what it goes.

    Raises UsageError if nothing can be sent there: no such command, or a service that needs apprise.

    >>> parse_target("https://example.org/hook")
    ('webhook', 'https://example.org/hook')
    >>> parse_target("cmd:logger -t training")
    ('command', ['sh', '-c', 'logger -t training'])
    """
    if target.startswith(("https://", "http://")):
        return "webhook", target
    if target.startswith(_COMMAND):
        return "command", ["sh", "-c", target.removeprefix(_COMMAND)]
    if "://" in target:
        if find_spec("apprise") is None:
            raise UsageError(
                f"--notify {shown(target)}: addresses of this kind need apprise, which is not installed",
                hint="pip install 'unbroken[notify]', or give a https:// address or a command",
            )
        return "apprise", target
    program = shutil.which(target) if os.path.dirname(target) else None
    if program is None:
        raise UsageError(
            f"--notify {target}: expected a URL, cmd:COMMAND or the path of a program, found none there",
            hint="write ./notify.sh for a program here, and try `chmod +x` if it is there",
        )
    return "command", [str(Path(program).absolute())]


def wanted_targets(given: Sequence[str]) -> tuple[str, ...]:
    """Return the targets `given`, else those of the environment, with paths from the root on.

    Raises UsageError as `parse_target` does.
    """
    targets = given or [line for line in os.environ.get(NOTIFY_VARIABLE, "").splitlines() if line]
    return tuple(_from_the_root(target) for target in targets)


def _from_the_root(target: str) -> str:
    kind, to = parse_target(target)
    is_program = kind == "command" and not target.startswith(_COMMAND)
    return str(to[0]) if is_program else target


def shown(target: str) -> str:
    """Return `target` without what may be a secret in it, for logs.

    >>> shown("https://hooks.example.org/T0/B0/secret"), shown("cmd:curl -H 'Token: x'"), shown("tgram://1:x/2")
    ('https://hooks.example.org', 'cmd:curl', 'tgram://')
    """
    scheme, separator, rest = target.partition("://")
    if target.startswith(_COMMAND):
        return " ".join(target.split()[:1])
    if not separator:
        return target
    host = rest.partition("/")[0].rpartition("@")[2]
    return f"{scheme}://{host}" if scheme in ("http", "https") else f"{scheme}://"


def worth_telling(kind: str, fields: dict[str, Any], *, cause: str = "") -> tuple[str, str, str] | None:
    """Return `(event, text, hint)` of a notification about an event of the journal, or None.

    `cause` is why the last attempt ended, if that is known.
    """
    hint = str(fields.get("hint") or "")
    reason = str(fields.get("reason") or "")
    match kind:
        case "run-ended":
            event = _AT_THE_END.get(fields["action"], fields["action"])
            return event, f"{event.replace('-', ' ')}: {reason}", hint
        # One that training has decided was told by its alarm.
        case "decision" if fields.get("action") == _ROLL_BACK and fields.get("back_to"):
            return "rollback", reason, hint
        case "decision" if cause in _OUT_OF_MEMORY:
            return "restart-after-oom", f"memory ran out; restarting: {reason}", hint
        case "saves-missed":
            return "saves-missed", f"no checkpoint: {reason}", hint
        case "hang-suspected":
            silent, limit = fields["silent_seconds"], fields["limit_seconds"]
            where = f"phase {fields['phase']}, step {fields['step']}"
            return "hang-suspected", f"no progress for {silent:.0f} s ({where}; limit {limit:.0f} s)", hint
        case "stop-requested" if fields["is_preemption"]:
            return "preemption", reason, hint
        case "alarm" if fields.get("source") == "training" and fields["alarm"] == OVER:
            return None
        case "alarm" if fields.get("source") == "training":
            event = "rollback" if fields["alarm"] == _ROLL_BACK else "training-alarm"
            return event, str(fields["text"]), hint
        case "alarm" if fields["alarm"] in ("memory", "disk"):
            return f"{fields['alarm']}-alarm", str(fields["text"]), hint
        case _:
            return None


class Notifications:
    """Sends what is worth telling about the events of `records` to all `targets`, by `errands`."""

    def __init__(self, targets: Sequence[str], records: Records, errands: Errands, directory: Path) -> None:
        self._targets: list[tuple[str, str, Any]] = []
        for target in targets:
            try:
                self._targets.append((shown(target), *parse_target(target)))
            except UsageError as error:
                # It was there when the run was started: no reason not to take the run over.
                say(f"nothing is sent there: {error.message}")
        self._records = records
        self._errands = errands
        self._directory = directory
        self._cause = ""
        records.listen(self._on_event)

    @property
    def has_targets(self) -> bool:
        return bool(self._targets)

    def _on_event(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "attempt-ended":
            self._cause = fields.get("cause", "")
        found = worth_telling(kind, fields, cause=self._cause)
        if found is None:
            return
        notice = self._notice(*found, fields)
        for name, errand, to in self._targets:
            self._errands.hand({"errand": errand, "name": name, "to": to, "notice": notice})

    def _notice(self, event: str, text: str, hint: str, fields: dict[str, Any]) -> dict[str, Any]:
        snapshot = self._records.snapshot
        return {
            "event": event,
            "text": f"{snapshot.name}: {text}"[:_LONGEST_TEXT],
            "hint": hint[:_LONGEST_TEXT],
            "run": snapshot.name,
            "run_id": snapshot.run_id,
            "directory": str(self._directory),
            "host": snapshot.supervisor.host,
            "attempt": snapshot.attempt,
            "outcome": snapshot.outcome,
            "exit_code": fields.get("exit_code"),
            "time": round(time.time(), 3),
        }


def on_report(records: Records, errand: dict[str, Any], problem: str) -> None:
    """Record how an errand went."""
    if errand["errand"] == "compress":
        return
    event, target = errand["notice"]["event"], errand["name"]
    if problem:
        records.event("notification-failed", notification=event, target=target, reason=problem)
    else:
        records.event("notification-sent", notification=event, target=target)


def is_notification(errand: dict[str, Any]) -> bool:
    """Tell whether an errand is one that the end of a run waits for a little."""
    return bool(errand["errand"] != "compress")
