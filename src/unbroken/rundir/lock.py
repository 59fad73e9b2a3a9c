"""One writer per run: a lock the kernel frees when its holder dies, and words about who holds it.

Where the kernel cannot know (no locks on this file system, a holder on another host) a lease tells a
living holder from a dead one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeAlias

from unbroken.errors import RunBusyError
from unbroken.rundir.files import create_json, read_json, write_json
from unbroken.rundir.lease import LEASE_SECONDS, Lease, is_changed, read_lease
from unbroken.rundir.place import is_elsewhere, place_of
from unbroken.rundir.processes import ProcessIdentity, identify_self, is_alive, is_same
from unbroken.rundir.tell import tell
from unbroken.storage.base import TEMPORARY_PREFIX
from unbroken.storage.failures import failed

# What this process holds, by process and path. The kernel would give a process its own lock again, and
# closing the second descriptor would free the first. A forked child inherits this record but not the
# locks: the number of the process tells.
_held: dict[tuple[int, str], object] = {}
# What file systems say that have no locks, or whose lock server is not there.
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}

Claim: TypeAlias = Literal["dead", "alive", "unknown"]
_Holder: TypeAlias = tuple[ProcessIdentity, dict[str, Any]]


class RunLock:
    """Holds `lock_path` for this process, with who and since when in `holder_path`.

    A POSIX record lock, not flock: it is not inherited by fork, so a data worker that outlives a
    killed trainer by a moment does not keep the next attempt out. Hazard: closing *any* descriptor
    of the lock file in this process frees it, so nothing else may open that file.

    A lease beside the lock is renewed all the while. Who finds a holder that the lock says nothing about
    watches it for `lease_seconds` before the holder counts as dead. One that was only asleep is not the
    holder any more when it wakes up; `is_still_ours` tells it.
    """

    def __init__(
        self,
        lock_path: Path,
        holder_path: Path,
        *,
        doing: str = "writes to this run",
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        self._lock_path = lock_path
        self._holder_path = holder_path
        self._lease_path = lock_path.with_suffix(".lease")
        self._lease = Lease(self._lease_path, lease_seconds)
        self._lease_seconds = lease_seconds
        self._doing = doing
        self._descriptor = -1
        self._held_as: tuple[int, str] | None = None

    def acquire(self, **words: Any) -> None:
        """Take the lock and write `words` about its holder.

        Raises RunBusyError with host, process and time of the holder if another process has it, and with
        this process if that has it already, by this lock or another. Waits only to watch a holder that
        the lock says nothing about, no longer than its lease.
        """
        place = (os.getpid(), os.path.realpath(self._lock_path))
        mark = object()
        # Before the file is opened, and in one operation: of two threads, one gets its mark in.
        if _held.setdefault(place, mark) is not mark:
            raise RunBusyError(
                f"{self._lock_path.parent}: process {place[0]}, this one, {self._doing} already",
                hint="leave the `with` block of that run first, or use another run directory",
            )
        said = {
            **words,
            **identify_self().to_json(),
            **place_of(self._lock_path.parent),
            "since": time.time(),
            "lease_seconds": self._lease_seconds,
        }
        try:
            self._take(said)
            try:
                self._lease.begin()
            except BaseException:
                self._holder_path.unlink(missing_ok=True)
                raise
        except BaseException:
            self._close()
            del _held[place]
            raise
        self._held_as = place

    def release(self) -> None:
        """Give the lock back; releasing twice is no error.

        In a forked child only the child forgets it: the lock and the holder file are the parent's. What
        another process has taken over is that one's, too.
        """
        place = self._held_as
        if place is None:
            return
        try:
            if self.is_still_ours():
                self._holder_path.unlink(missing_ok=True)
        finally:
            self._held_as = None
            self._lease.end()
            self._close()
            _held.pop(place, None)

    def is_still_ours(self) -> bool:
        """Tell whether this process holds the lock, and no other has taken it over. Reads the disk."""
        if self._held_as is None or self._held_as[0] != os.getpid():
            return False
        holder = self.holder()
        return holder is not None and is_same(holder[0], identify_self())

    def holder(self) -> _Holder | None:
        """Return who wrote the holder file and all that it says, or None if there is none.

        That in a copy of the directory speaks of the original, and so of nobody here.
        """
        words = read_json(self._holder_path)
        if words is None or is_elsewhere(words, self._lock_path.parent):
            return None
        identity = ProcessIdentity.from_json(words)
        return (identity, words) if identity is not None else None

    def _take(self, said: dict[str, Any]) -> None:
        has_locks = self._lock()
        dead = self._dead_holder(has_locks)
        if has_locks:
            write_json(self._holder_path, said)
            return
        # Without locks, only making a file is atomic. Of two that found the same holder dead one gets it;
        # should both, the number of the newest attempt and these words let one of them write.
        if dead is not None and not self._take_away(dead):
            raise self._busy()
        if not create_json(self._holder_path, said):
            raise self._busy()

    def _take_away(self, dead: _Holder) -> bool:
        """Remove the words of a dead holder; False if they were replaced meanwhile by those of a live one."""
        aside = self._holder_path.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}-{os.urandom(4).hex()}")
        try:
            # Renamed before it is looked at: to look first would be to remove what came in between.
            os.rename(self._holder_path, aside)
        except FileNotFoundError:
            # Another starter was faster; which of us makes the new file is decided by making it.
            return True
        try:
            if read_json(aside) == dead[1]:
                return True
            with suppress(FileExistsError):
                os.link(aside, self._holder_path)
            return False
        finally:
            aside.unlink(missing_ok=True)

    def _lock(self) -> bool:
        """Lock the file, and return False if this file system has no locks."""
        try:
            self._descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            if self._descriptor < 0:
                raise failed("lock", self._lock_path, error) from error
            raise self._busy() from None
        except OSError as error:
            if self._descriptor < 0 or error.errno not in _NO_LOCKS:
                raise failed("lock", self._lock_path, error) from error
            return False
        return True

    def _dead_holder(self, has_locks: bool) -> _Holder | None:
        """Return whom the holder file names, if anybody. Raises RunBusyError if that process lives."""
        found = self.holder()
        claim = "dead" if found is None else judge(found[0], identify_self(), has_locks=has_locks)
        if found is None or claim == "dead":
            return found
        if claim == "alive":
            raise self._busy()
        if not self._is_renewed(found):
            return found
        if self.holder() is not None:
            raise self._busy()
        # Released while we looked.
        return None

    def _is_renewed(self, found: _Holder) -> bool:
        """Watch a holder, for as long as its lease holds, and tell whether anything changes."""
        first = (found, read_lease(self._lease_path))
        holder, words = found
        seconds = max(self._lease_seconds, _number(words.get("lease_seconds")))
        tell(
            f"process {holder.process_id} on {holder.host} held {self._lock_path.parent}; "
            f"watching for up to {seconds:g} seconds whether it still does"
        )
        return is_changed(lambda: (self.holder(), read_lease(self._lease_path)), first, seconds)

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _busy(self) -> RunBusyError:
        holder = self.holder()
        who = "another process"
        if holder is not None:
            identity, words = holder
            since = datetime.fromtimestamp(_number(words.get("since")), UTC).isoformat(timespec="seconds")
            who = f"process {identity.process_id} on {identity.host} since {since}"
        return RunBusyError(
            f"{self._lock_path.parent}: {who} {self._doing}",
            hint="wait for it, stop it with `unbroken stop`, or start in another run directory",
        )


def judge(holder: ProcessIdentity, me: ProcessIdentity, *, has_locks: bool) -> Claim:
    """Tell what can be known, without a lease, about `holder` whom `me` finds in its way.

    With `has_locks` the lock is ours already, which says something about processes of the same kernel
    only: locks need not reach further, even where a file system accepts them.
    """
    if holder == me:
        return "dead"
    is_same_kernel = holder.boot_id != "" and holder.boot_id == me.boot_id
    if holder.host != me.host:
        # A container whose name changes with each start shares our kernel, and had to give its lock back.
        return "dead" if is_same_kernel and has_locks else "unknown"
    if has_locks:
        return "alive" if is_alive(holder) else "dead"
    # Another kernel under our name may be this host before it was booted, or one that is called the same.
    return "dead" if is_same_kernel and not is_alive(holder) else "unknown"


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
