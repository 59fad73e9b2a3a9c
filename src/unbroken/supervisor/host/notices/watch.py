"""Asking a provider again and again, in a thread of its own: a slow answer delays nothing."""

from __future__ import annotations

import queue
import threading
import time

from unbroken.supervisor.host.notices.base import Notice, Provider
from unbroken.supervisor.host.notices.http import Metadata

_TIMEOUT_SECONDS = 2.0
# Refused that often in a row it is no passing trouble: said once, and asked less often from then on.
_FAILURES_SAID = 3
_TRY_AGAIN_SECONDS = 60.0
# One that has answered is there: of half a minute's notice, most is to be left when it is back.
_TRY_KNOWN_AGAIN_SECONDS = 10.0


class NoticeWatch:
    """Asks `provider` at `url`, its own address if that is None, from `start` to the end of the process.

    Started with signals blocked, so that they go to the thread that takes them.
    """

    def __init__(self, provider: Provider, url: str | None = None) -> None:
        self.name = provider.name
        self._provider = provider
        self._url = url or provider.base_url
        self._standing: tuple[Notice, ...] = ()
        self._troubles: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._failures = 0
        self._has_answered = False

    def start(self) -> None:
        """Begin to ask."""
        threading.Thread(target=self._run, name="unbroken-notices", daemon=True).start()

    @property
    def standing(self) -> tuple[Notice, ...]:
        """All that is announced, by the last answer."""
        return self._standing

    def troubles(self) -> list[str]:
        """Return in words what kept it from asking since the last call; never waits."""
        found = []
        while not self._troubles.empty():
            found.append(self._troubles.get())
        return found

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
            timeout = _TIMEOUT_SECONDS if self._has_answered else self._provider.first_seconds
            notices = self._provider.ask(Metadata(self._url, timeout_seconds=timeout))
        except (OSError, ValueError) as error:
            self._failures += 1
            if self._failures == _FAILURES_SAID:
                self._troubles.put(f"{self._url} does not answer: {error}")
        else:
            self._failures = 0
            self._has_answered = True
            self._standing = tuple(notices)
        return pause_seconds(
            self._provider.every_seconds, failures=self._failures, has_answered=self._has_answered
        )


def pause_seconds(every_seconds: float, *, failures: int, has_answered: bool) -> float:
    """Return after how long a service is asked again that failed to answer `failures` times in a row.

    `every_seconds` is how often it is asked as long as it answers.

    >>> [pause_seconds(5.0, failures=count, has_answered=True) for count in (0, 2, 3)]
    [5.0, 5.0, 10.0]
    """
    if failures < _FAILURES_SAID:
        return every_seconds
    return _TRY_KNOWN_AGAIN_SECONDS if has_answered else _TRY_AGAIN_SECONDS
