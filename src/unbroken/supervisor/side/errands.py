"""Handing errands to a process that is no child of ours, without ever waiting for it."""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unbroken.rundir import layout
from unbroken.rundir.process_tree import spawn_orphan
from unbroken.supervisor.records import say

_PROCESS = Path(__file__).with_name("errand_process.py")
_PIECE_BYTES = 1 << 16
# What does not fit into the pipe waits here; a process that takes nothing for so long takes nothing more.
_MOST_WAITING_BYTES = 1 << 20


class Errands:
    """Hands out errands for the run in `directory`, and calls `on_report` with each and what went wrong.

    `on_lost` is called when the process that runs them was killed.

    The process that runs them is started by `start` and lives until `close`; killed, it is started anew by
    the next `start`. Nothing here raises or waits, but `close`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        on_report: Callable[[dict[str, Any], str], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._directory = directory
        self._on_report = on_report
        self._on_lost = on_lost
        self._to = -1
        self._from = -1
        self._outgoing = b""
        self._incoming = b""
        self._count = 0
        self._pending: dict[int, dict[str, Any]] = {}

    @property
    def is_running(self) -> bool:
        """True from `start` until the process is found gone."""
        return self._to >= 0

    def start(self) -> None:
        """Start the process, if it does not run. Only while this process has no descendants."""
        if self.is_running:
            return
        if os.getpid() == 1:
            # All orphans are ours then, also that process.
            say("nothing is sent or compressed by the first process of a container")
            return
        to_read, to = os.pipe()
        back, to_write = os.pipe()
        log = self._open_log()
        try:
            spawn_orphan(
                [sys.executable, "-I", "-S", str(_PROCESS)],
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, to_read, 0),
                    (os.POSIX_SPAWN_DUP2, to_write, 1),
                    (os.POSIX_SPAWN_DUP2, log, 2),
                ],
            )
        except OSError as error:
            say(f"nothing can be sent or compressed: {error}")
            os.close(to)
            os.close(back)
            return
        finally:
            for descriptor in (to_read, to_write, log):
                os.close(descriptor)
        os.set_blocking(to, False)
        os.set_blocking(back, False)
        self._to, self._from = to, back

    def hand(self, errand: dict[str, Any]) -> None:
        """Hand out an errand, unless the same is under way; without the process it is reported as failed."""
        if errand in self._pending.values():
            return
        self._count += 1
        self._pending[self._count] = errand
        if not self.is_running or len(self._outgoing) > _MOST_WAITING_BYTES:
            self._report(self._count, "the process that does this is not there")
            return
        self._outgoing += json.dumps({**errand, "id": self._count}).encode() + b"\n"
        self._flush()

    def look(self) -> None:
        """Take note of what was done."""
        if not self.is_running:
            return
        if not self._flush():
            return
        try:
            piece = os.read(self._from, _PIECE_BYTES)
        except BlockingIOError:
            return
        if not piece:
            self._lose()
            return
        *lines, self._incoming = (self._incoming + piece).split(b"\n")
        for line in lines:
            report = json.loads(line)
            self._report(report["id"], report["problem"])

    def close(self, *, wait_seconds: float, wait_for: Callable[[dict[str, Any]], bool]) -> None:
        """Let the process end when it has done all; wait for those that matter, `wait_seconds` at most."""
        until = time.monotonic() + wait_seconds
        while self.is_running and any(wait_for(errand) for errand in self._pending.values()):
            left = until - time.monotonic()
            if left <= 0:
                break
            select.select([self._from], [], [], left)
            self.look()
        self._close()

    def _open_log(self) -> int:
        try:
            path = self._directory / layout.SUPERVISOR_LOG
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError:
            return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)

    def _flush(self) -> bool:
        """Pass on what waits, as far as it fits; False if the process is gone."""
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[os.write(self._to, self._outgoing) :]
        except BlockingIOError:
            return True
        except OSError:
            self._lose()
            return False
        return True

    def _lose(self) -> None:
        """The process was killed: nobody knows what of its errands was done."""
        self._close()
        self._on_lost()
        for number in list(self._pending):
            self._report(number, "the process that does this was gone before it was done")

    def _close(self) -> None:
        if self.is_running:
            os.close(self._to)
            os.close(self._from)
        self._to = self._from = -1
        self._outgoing = self._incoming = b""

    def _report(self, number: int, problem: str) -> None:
        errand = self._pending.pop(number, None)
        if errand is not None:
            self._on_report(errand, problem)
