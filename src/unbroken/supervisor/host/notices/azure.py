"""Microsoft Azure: scheduled events, of which only those count that name this machine."""

from __future__ import annotations

import datetime
import json
from typing import Any, ClassVar

from unbroken.supervisor.host.notices.base import Kind, Notice, utc_seconds
from unbroken.supervisor.host.notices.http import Metadata

_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_HEADERS = {"Metadata": "true"}
_OK = 200
# Where no time is given the event has begun, or the least that is promised for a preemption is left.
_LEAST_SECONDS = 30.0
_KINDS: dict[str, tuple[Kind, str]] = {
    "Preempt": ("end", "the spot machine is taken back"),
    "Terminate": ("end", "the machine is deleted"),
    "Reboot": ("end", "the machine is rebooted"),
    "Redeploy": ("end", "the machine moves to another host, and its local disk is lost"),
    "Freeze": ("risk", "the machine stands still for some seconds"),
}


class Azure:
    """The instance metadata service. The first question switches its events on, and may take minutes."""

    name: ClassVar[str] = "azure"
    base_url: ClassVar[str] = "http://169.254.169.254"
    every_seconds: ClassVar[float] = 2.0
    first_seconds: ClassVar[float] = 150.0

    def __init__(self) -> None:
        self._machine: str | None = None

    def ask(self, metadata: Metadata) -> list[Notice]:
        """Return what is announced now. Raises OSError or ValueError if there is no sensible answer."""
        if self._machine is None:
            self._machine = self._text(metadata, _NAME)
        return parse_events(self._text(metadata, _EVENTS), self._machine)

    def _text(self, metadata: Metadata, path: str) -> str:
        answer = metadata.get(path, _HEADERS)
        if answer.status != _OK:
            raise ValueError(f"{path}: expected status 200, found {answer.status}")
        return answer.text


def parse_events(text: str, machine: str) -> list[Notice]:
    """Return the notices for `machine` in the JSON of the service. Raises ValueError."""
    value = json.loads(text)
    events = value.get("Events") if isinstance(value, dict) else None
    if not isinstance(events, list):
        raise ValueError(f"expected scheduled events, found {text[:80]!r}")
    # Machines that share a scale set or a service see the events of all of them.
    own = [event for event in events if isinstance(event, dict) and machine in (event.get("Resources") or ())]
    return [_notice(event) for event in own if event.get("EventType") in _KINDS]


def _notice(event: dict[str, Any]) -> Notice:
    kind, what = _KINDS[event["EventType"]]
    at = _time(str(event.get("NotBefore") or ""))
    within = _LEAST_SECONDS if kind == "end" and at is None else None
    return Notice(kind=kind, what=f"{what} ({event['EventType']})", at_seconds=at, within_seconds=within)


def _time(text: str) -> float | None:
    """Return the time that an event gives, in either form that the service has used, or None."""
    if not text:
        return None
    if text.endswith("GMT"):
        moment = datetime.datetime.strptime(text, "%a, %d %b %Y %H:%M:%S GMT")
        return moment.replace(tzinfo=datetime.UTC).timestamp()
    return utc_seconds(text)
