"""Google Compute Engine: preemption, half a minute ahead; maintenance of the host."""

from __future__ import annotations

from typing import ClassVar

from unbroken.supervisor.host.notices.base import Notice
from unbroken.supervisor.host.notices.http import Metadata

_INSTANCE = "/computeMetadata/v1/instance"
_HEADERS = {"Metadata-Flavor": "Google"}
# The machine is switched off in order, and half a minute later in any case.
_PREEMPTION_SECONDS = 30.0
_WAIT_SECONDS = 5
_OK = 200


class Google:
    """The metadata server, which holds a question back until something changes."""

    name: ClassVar[str] = "gcp"
    base_url: ClassVar[str] = "http://metadata.google.internal"
    # All of it is spent waiting for the answer, so that of half a minute nothing is lost.
    every_seconds: ClassVar[float] = 5.0
    first_seconds: ClassVar[float] = 2.0

    def __init__(self) -> None:
        self._waits = False

    def ask(self, metadata: Metadata) -> list[Notice]:
        """Return what is announced now, or what changes in the next seconds. Raises OSError or ValueError."""
        preempted = self._preempted(metadata)
        maintenance = self._value(metadata, f"{_INSTANCE}/maintenance-event")
        notices = []
        if preempted == "TRUE":
            notices.append(
                Notice(kind="end", what="the instance is preempted", within_seconds=_PREEMPTION_SECONDS)
            )
        if maintenance not in ("NONE", ""):
            # Not an end: it comes up to an hour later, and what ends the machine then says so by SIGTERM.
            notices.append(Notice(kind="risk", what=f"maintenance of the host ({maintenance})"))
        return notices

    def _preempted(self, metadata: Metadata) -> str:
        path = f"{_INSTANCE}/preempted"
        if not self._waits:
            # What is so already is no change.
            value = self._value(metadata, path)
            self._waits = True
            return value
        waiting = f"{path}?wait_for_change=true&timeout_sec={_WAIT_SECONDS}"
        return self._value(metadata, waiting, extra_seconds=_WAIT_SECONDS)

    def _value(self, metadata: Metadata, path: str, *, extra_seconds: float = 0) -> str:
        answer = metadata.get(path, _HEADERS, extra_seconds=extra_seconds)
        if answer.status != _OK:
            raise ValueError(f"{path}: expected a value, found status {answer.status}")
        return answer.text
