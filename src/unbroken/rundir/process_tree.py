"""Starting a command in a session of its own, and ending everything that came out of it.

Whoever starts it is a child subreaper: a process whose parent died is handed to it, also one that made
a session of its own to get away. So all that the command ever started is a descendant of ours, and
"the kernel knows no child of ours" proves that nothing of it is left.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from unbroken.rundir import layout
from unbroken.rundir.processes import ProcessStat, everyone, read_stat

_PR_SET_CHILD_SUBREAPER = 36
# Python ignores SIGPIPE and SIGXFSZ, the supervisor SIGHUP, a shell's background job SIGINT and
# SIGQUIT; ignored signals would stay ignored in what we start.
_RESET = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGPIPE,
    signal.SIGTERM,
    signal.SIGCHLD,
    signal.SIGXFSZ,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_LOOK_AGAIN_SECONDS = 0.02


def become_subreaper() -> None:
    """Make orphans among our descendants our children instead of init's."""
    _set_subreaper(1)


def leave_orphans_to_init() -> None:
    """Undo `become_subreaper`."""
    _set_subreaper(0)


def spawn_orphan(command: Sequence[str], *, file_actions: Sequence[tuple[Any, ...]]) -> None:
    """Start `command`, which forks and ends at once, so that its child is no descendant of this subreaper.

    Only while this process has no descendants: meanwhile orphans would be handed to init instead of us, and
    the proof that nothing is left of an attempt would be none. Raises OSError when it cannot be started.
    """
    # A process with these in its environment counts as part of an attempt.
    tags = (layout.RUN_DIR_VARIABLE, layout.ATTEMPT_VARIABLE)
    leave_orphans_to_init()
    try:
        child = os.posix_spawn(
            command[0],
            list(command),
            {name: value for name, value in os.environ.items() if name not in tags},
            file_actions=file_actions,
            setsid=True,
            setsigmask=[],
            setsigdef=[signal.SIGHUP],
        )
        # Its child is init's before we know of its end.
        os.waitpid(child, 0)
    finally:
        become_subreaper()


def _set_subreaper(value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def spawn(command: Sequence[str], *, environment: Mapping[str, str], output: Path) -> int:
    """Start `command` and return the id of its process, the leader.

    It leads a session of its own, reads nothing, and writes stdout and stderr straight to the file
    `output`: it needs no process of ours to live on. Raises OSError when it cannot be started.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.posix_spawnp(
        command[0],
        list(command),
        environment,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(output), flags, 0o666),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigmask=[],
        setsigdef=_RESET,
    )


class Cell(Protocol):
    """A group of processes that the kernel keeps: nothing started inside of it gets out."""

    def kill(self) -> None:
        """Send SIGKILL to all that is in it."""

    def is_empty(self) -> bool:
        """Tell whether no living process is in it."""


class ProcessTree:
    """The process `leader` that this process started, and everything that came out of it.

    Invariant: this process has no children but those of one tree, and it alone waits for them. If all of
    the tree is in a `cell`, that must be empty too before the tree counts as ended.
    """

    def __init__(self, leader: int, cell: Cell | None = None) -> None:
        self.leader = leader
        self._cell = cell
        self.wait_status: int | None = None
        self._asked: set[tuple[int, int]] = set()

    @property
    def leader_ended(self) -> bool:
        """True once `wait_status` holds how the leader ended, in the form of wait(2)."""
        return self.wait_status is not None

    def collect(self) -> bool:
        """Take note of what ended, and return True when nothing of the tree is left."""
        while True:
            try:
                process_id, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                # The proof: no child, not even a zombie. A descendant would have one of them above it.
                return True
            if process_id == 0:
                return False
            if process_id == self.leader:
                self.wait_status = status

    def ask(self) -> None:
        """Send SIGTERM to the leader alone; once it ended, to those that were its children. Once each.

        Their data workers must live on: their death would make the save fail that this signal asks for.
        """
        if not self.leader_ended:
            heads = [member for member in _descendants(os.getpid()) if member.process_id == self.leader]
        else:
            # A shell that was between us and the training is gone, and what it ran is ours now.
            heads = [member for member in _descendants(os.getpid()) if member.parent_id == os.getpid()]
        _signal_once(heads, signal.SIGTERM, self._asked)

    def members(self) -> list[ProcessStat]:
        """Return the living processes of the tree, the leader included; one reading, not a proof."""
        return [member for member in _descendants(os.getpid()) if member.state not in "ZX"]

    def end(self, *, term_seconds: float, kill_seconds: float) -> list[str]:
        """End all of the tree: SIGTERM, after `term_seconds` SIGKILL, for `kill_seconds` at most.

        Returns in words what could not be ended; empty means proved empty.
        """
        if self._wait_empty(signal.SIGTERM, term_seconds) or self._wait_empty(signal.SIGKILL, kill_seconds):
            return []
        # Without the proof there is something, even where /proc does not show it to us.
        return [_described(member) for member in self.members()] or ["a process that cannot be seen"]

    def _wait_empty(self, number: signal.Signals, seconds: float) -> bool:
        until = time.monotonic() + seconds
        signalled: set[tuple[int, int]] = set()
        while not (self.collect() and (self._cell is None or self._cell.is_empty())):
            if time.monotonic() >= until:
                return False
            if self._cell is not None and number == signal.SIGKILL:
                self._cell.kill()
            # Again and again: a process may have been forked while we looked at the others.
            _signal_once(_descendants(os.getpid()), number, signalled)
            time.sleep(_LOOK_AGAIN_SECONDS)
        return True


def _described(member: ProcessStat) -> str:
    """Return it in words, with what it waits for in the kernel if nothing ends it until that comes."""
    if member.state != "D":
        return str(member)
    try:
        where = Path(f"/proc/{member.process_id}/wchan").read_text().strip()
    except OSError:
        where = ""
    return f"{member}, which waits in {where}" if where not in ("", "0") else str(member)


def _signal_once(members: Sequence[ProcessStat], number: signal.Signals, done: set[tuple[int, int]]) -> None:
    for member in members:
        who = (member.process_id, member.start_ticks)
        if who not in done:
            done.add(who)
            _signal(member, number)


def _signal(member: ProcessStat, number: signal.Signals) -> None:
    # The number may have gone to a stranger since it was read: look once more.
    now = read_stat(member.process_id)
    if now is None or now.start_ticks != member.start_ticks:
        return
    # PermissionError: a process of another user; it shows up among those that could not be ended.
    with suppress(ProcessLookupError, PermissionError):
        os.kill(member.process_id, number)
        # A stopped process sees nothing but SIGKILL until it is continued.
        os.kill(member.process_id, signal.SIGCONT)


def _descendants(root: int) -> list[ProcessStat]:
    children: defaultdict[int, list[ProcessStat]] = defaultdict(list)
    for member in everyone():
        children[member.parent_id].append(member)
    found: list[ProcessStat] = []
    todo = [root]
    while todo:
        below = children.pop(todo.pop(), [])
        found += below
        todo += [member.process_id for member in below]
    return found
