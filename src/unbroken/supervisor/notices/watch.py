"""Asking a provider again and again, in a thread of its own: a slow answer delays nothing."""

from __future__ import annotations

import queue
import threading
import time
from typing import TypeVar

from unbroken.supervisor.notices.base import Notice, Provider
from unbroken.supervisor.notices.http import Metadata

_TIMEOUT_SECONDS = 2.0
# Refused that often in a row it is no passing trouble: said once, and asked less often from then on.
_FAILURES_SAID = 3
_TRY_AGAIN_SECONDS = 60.0
T = TypeVar("T")


class NoticeWatch:
    """Asks `provider` at `url`, its own address if that is None, from `start` to the end of the process.

    Started with signals blocked, so that they go to the thread that takes them.
    """

    def __init__(self, provider: Provider, url: str | None = None) -> None:
        self.name = provider.name
        self._provider = provider
        self._url = url or provider.base_url
        self._news: queue.SimpleQueue[Notice] = queue.SimpleQueue()
        self._troubles: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._last: list[Notice] = []
        self._failures = 0
        self._timeout_seconds = provider.first_seconds

    def start(self) -> None:
        """Begin to ask."""
        threading.Thread(target=self._run, name="unbroken-notices", daemon=True).start()

    def news(self) -> list[Notice]:
        """Return what was announced since the last call; never waits."""
        return _taken(self._news)

    def troubles(self) -> list[str]:
        """Return in words what kept it from asking since the last call."""
        return _taken(self._troubles)

    def _run(self) -> None:
        try:
            while True:
                begun = time.monotonic()
                pause = self._ask()
                time.sleep(max(0.0, begun + pause - time.monotonic()))
        finally:
            self._troubles.put("nobody asks it any more, see supervisor.log")

    def _ask(self) -> float:
        """Ask once, and return after how long to ask again."""
        try:
            metadata = Metadata(self._url, timeout_seconds=self._timeout_seconds)
            notices = self._provider.ask(metadata)
        except (OSError, ValueError) as error:
            self._failures += 1
            if self._failures == _FAILURES_SAID:
                self._troubles.put(f"{self._url} does not answer: {error}")
            return self._provider.every_seconds if self._failures < _FAILURES_SAID else _TRY_AGAIN_SECONDS
        self._failures = 0
        self._timeout_seconds = _TIMEOUT_SECONDS
        for notice in notices:
            if notice not in self._last:
                self._news.put(notice)
        self._last = notices
        return self._provider.every_seconds


def _taken(waiting: queue.SimpleQueue[T]) -> list[T]:
    found = []
    while not waiting.empty():
        found.append(waiting.get())
    return found
