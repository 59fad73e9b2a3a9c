"""Verifying checkpoints beside the thread that supervises: to read one may take minutes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

from unbroken.errors import UnbrokenError
from unbroken.supervisor.records import say


class Verification:
    """Calls `verify` in a thread of its own, which ends with the process; `newest` is what it returned.

    Whoever made it is woken by a SIGCHLD when `is_done` is set. Made with signals blocked, so that they stay
    with the thread that takes them.
    """

    def __init__(self, verify: Callable[[], str | None]) -> None:
        self._verify = verify
        self._waiting = threading.get_ident()
        self.newest: str | None = None
        self.is_done = False
        threading.Thread(target=self._run, name="unbroken-verification", daemon=True).start()

    def _run(self) -> None:
        try:
            self.newest = self._verify()
        except UnbrokenError as error:
            # Not proved is no progress: the failures go on counting.
            say(f"the newest checkpoint could not be verified: {error.message}")
        finally:
            self.is_done = True
            signal.pthread_kill(self._waiting, signal.SIGCHLD)
