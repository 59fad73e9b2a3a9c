"""The processes of an attempt that another supervisor started: they are not our children.

They are found by the environment that they inherit on, by the session of their leader, and by descent;
what was found once stays known. No kernel proves here that none is left: two looks in a row that find
nothing must do.
"""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from unbroken.rundir import layout
from unbroken.rundir.pidfd import HeldProcess
from unbroken.rundir.place import is_same_place
from unbroken.rundir.processes import ProcessIdentity, ProcessStat, everyone, read_stat

_LOOK_AGAIN_SECONDS = 0.02
_BETWEEN_LOOKS_SECONDS = 0.05
# While the leader lives a look serves only to know those whom nothing would tell later.
_GET_TO_KNOW_SECONDS = 30.0
_EMPTY_LOOKS = 2


class AdoptedTree:
    """The attempt `attempt` of the run in `directory`: `leader`, if it is known, and all that came of it.

    For whoever watches it this is a `ProcessTree`; but `wait_status` may stay None after the leader's
    end, if nobody can tell how it ended.
    """

    def __init__(self, directory: Path, attempt: int, leader: ProcessIdentity | None) -> None:
        self.leader = leader.process_id if leader is not None else 0
        self.wait_status: int | None = None
        self.leader_ended = False
        self._directory, self._attempt = directory, attempt
        self._held = _hold(leader)
        self._known: set[tuple[int, int]] = set()
        # Looked at and found to be of something else: variables are inherited, they do not come later.
        self._strangers: set[tuple[int, int]] = set()
        self._asked: set[tuple[int, int]] = set()
        self._found: list[ProcessStat] = []
        self._empty_looks = 0
        self._next_look = 0.0
        # The number of a session stays taken as long as anything is in it, but not longer.
        self._has_session = self._held is not None

    def collect(self) -> bool:
        """Take note of what ended, and return True when nothing of the tree is left."""
        if not self.leader_ended and (self._held is None or self._held.has_ended):
            self.leader_ended = True
            self._next_look = 0.0
        if self.leader_ended and self._held is not None:
            self.wait_status = self._held.wait_status()
            self._held.close()
            self._held = None
        if time.monotonic() >= self._next_look:
            self._look()
        return self.leader_ended and self._empty_looks >= _EMPTY_LOOKS

    def ask(self) -> None:
        """Send SIGTERM to the leader alone; once it ended, to those that nothing of the tree is above."""
        if self.leader_ended:
            inside = {member.process_id for member in self._found}
            heads = [member for member in self._found if member.parent_id not in inside]
        else:
            heads = [member for member in self.members() if member.process_id == self.leader]
        _signal_once(heads, signal.SIGTERM, self._asked)

    def members(self) -> list[ProcessStat]:
        """Return the living processes of the tree, the leader included; one reading, not a proof."""
        self._look()
        return self._found

    def end(self, *, term_seconds: float, kill_seconds: float) -> list[str]:
        """End all of the tree: SIGTERM, after `term_seconds` SIGKILL, for `kill_seconds` at most.

        Returns in words what could not be ended; empty means that nothing was found, twice.
        """
        if self._wait_empty(signal.SIGTERM, term_seconds) or self._wait_empty(signal.SIGKILL, kill_seconds):
            return []
        return [str(member) for member in self.members()] or ["a process that cannot be seen"]

    def _wait_empty(self, number: signal.Signals, seconds: float) -> bool:
        until = time.monotonic() + seconds
        signalled: set[tuple[int, int]] = set()
        while not self.collect():
            if time.monotonic() >= until:
                return False
            # Again and again: a process may have been forked while we looked at the others.
            _signal_once(self._found, number, signalled)
            time.sleep(_LOOK_AGAIN_SECONDS)
            # Until the leader's end no look is due, but whoever is to be ended is looked for.
            self._next_look = min(self._next_look, time.monotonic() + _BETWEEN_LOOKS_SECONDS)
        return True

    def _look(self) -> None:
        there = list(everyone())
        inside = self._belonging(there)
        self._strangers &= {(member.process_id, member.start_ticks) for member in there}
        self._known = {(member.process_id, member.start_ticks) for member in inside}
        self._found = [member for member in inside if member.state not in "ZX"]
        self._empty_looks = 0 if self._found else self._empty_looks + 1
        pause = _GET_TO_KNOW_SECONDS if not self.leader_ended else _BETWEEN_LOOKS_SECONDS
        self._next_look = time.monotonic() + pause

    def _belonging(self, there: Sequence[ProcessStat]) -> list[ProcessStat]:
        children: defaultdict[int, list[ProcessStat]] = defaultdict(list)
        for member in there:
            children[member.parent_id].append(member)
        todo = [member for member in there if self._is_marked(member)]
        found: dict[int, ProcessStat] = {}
        while todo:
            member = todo.pop()
            # Whoever looks is no part of it, even if it was started from inside.
            if member.process_id in found or member.process_id == os.getpid():
                continue
            found[member.process_id] = member
            todo += children[member.process_id]
        return list(found.values())

    def _is_marked(self, member: ProcessStat) -> bool:
        who = (member.process_id, member.start_ticks)
        if who in self._known:
            return True
        if self._has_session and _session(member.process_id) == self.leader:
            return True
        if who in self._strangers:
            return False
        variables = _variables(member.process_id)
        is_ours = _attempt_of(variables, self._directory) == self._attempt
        # None at all are shown of a process that is just becoming another program.
        if len(variables) > 1 and not is_ours:
            self._strangers.add(who)
        return is_ours


def tagged(directory: Path) -> list[tuple[int, int]]:
    """Return `(process id, attempt)` of all living processes of attempts of the run in `directory`.

    This process and those above it are none of them, even where they are started from an attempt.
    """
    ourselves = _ancestors()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdecimal() or int(entry) in ourselves:
            continue
        attempt = _attempt_of(_variables(int(entry)), directory)
        if attempt is not None:
            found.append((int(entry), attempt))
    return sorted(found)


def _hold(leader: ProcessIdentity | None) -> HeldProcess | None:
    if leader is None:
        return None
    try:
        return HeldProcess(leader.process_id, leader.start_ticks)
    except ProcessLookupError:
        return None


def _signal_once(members: Sequence[ProcessStat], number: signal.Signals, done: set[tuple[int, int]]) -> None:
    for member in members:
        who = (member.process_id, member.start_ticks)
        if who in done:
            continue
        done.add(who)
        with suppress(ProcessLookupError):
            held = HeldProcess(*who)
            held.send(number)
            # A stopped process sees nothing but SIGKILL until it is continued.
            held.send(signal.SIGCONT)
            held.close()


def _attempt_of(variables: set[bytes], directory: Path) -> int | None:
    """Return of which attempt of the run in `directory` a process with those variables is, or None.

    Both must be there: a user may have set the directory in a shell.
    """
    attempt = _value(variables, layout.ATTEMPT_VARIABLE)
    place = _value(variables, layout.RUN_DIR_VARIABLE)
    if not place or not attempt.isdecimal() or not is_same_place(place, directory):
        return None
    return int(attempt)


def _value(variables: set[bytes], name: str) -> str:
    tag = os.fsencode(f"{name}=")
    return next((os.fsdecode(text[len(tag) :]) for text in variables if text.startswith(tag)), "")


def _variables(process_id: int) -> set[bytes]:
    try:
        return set(Path(f"/proc/{process_id}/environ").read_bytes().split(b"\0"))
    except OSError:
        # Gone meanwhile, or of another user and so not ours.
        return set()


def _session(process_id: int) -> int:
    try:
        return os.getsid(process_id)
    except OSError:
        return -1


def _ancestors() -> set[int]:
    found = set()
    above = read_stat(os.getpid())
    while above is not None:
        found.add(above.process_id)
        above = read_stat(above.parent_id)
    return found
