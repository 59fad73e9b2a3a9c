"""This process as an attempt of a run: its number, lock, journal, heartbeat and last words."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

from unbroken.errors import EXIT_ERROR, StorageError, UnbrokenError, UsageError
from unbroken.rundir import layout
from unbroken.rundir.control import clear_stop
from unbroken.rundir.files import sweep_temporary
from unbroken.rundir.heartbeat import Heartbeat
from unbroken.rundir.identity import RunIdentity, claim_attempt, given_attempt, open_run
from unbroken.rundir.journal import Journal
from unbroken.rundir.last_words import LastWords, write_last_words
from unbroken.rundir.lock import RunLock
from unbroken.rundir.stack_files import StackFile
from unbroken.rundir.tell import tell
from unbroken.rundir.writers import has_orphaned_writer, wait_for_writers

_OWN_SOURCE = str(Path(__file__).parents[1])
_MAX_MESSAGE = 2000


class Attempt:
    """Opens the run in `directory` for writing. Raises RunBusyError if another process does so.

    A refused starter leaves the run as it was: the lock comes first, the number after it.
    """

    def __init__(self, directory: Path) -> None:
        self.run = open_run(directory)
        self.run_directory = directory
        self._rank = 0
        lock = RunLock(directory / layout.WRITER_LOCK, directory / layout.WRITER_FILE)
        self._lock: RunLock | None = lock
        self._take(directory, lock)
        try:
            if given_attempt(directory) is None:
                # An old request: nobody can have asked this attempt yet. (A supervisor clears them itself.)
                clear_stop(directory)
            self.number = claim_attempt(directory)
            self.directory = layout.attempt_directory(directory, self.number)
            # The one that may fail for want of space comes first: the other holds a descriptor.
            self.heartbeat = Heartbeat(self.directory / layout.HEARTBEAT)
            self.journal = Journal(self.directory / layout.events_file())
            # Without a supervisor nobody would ask for them.
            is_supervised = given_attempt(directory) is not None
            self._stacks = StackFile(self.directory, _rank()) if is_supervised else None
        except BaseException:
            lock.release()
            raise

    def _take(self, directory: Path, lock: RunLock) -> None:
        """Take the lock when no earlier trainer has left a writer that is still at work."""
        while True:
            wait_for_writers(directory)
            lock.acquire()
            if not has_orphaned_writer(directory):
                return
            # Its trainer died between the two.
            lock.release()

    def sweep(self) -> list[str]:
        """Remove the half-written small files of processes that died, and return their names."""
        top = self.run_directory
        older = [layout.attempt_directory(top, number) for number in layout.attempts(top)]
        places = [top, (top / layout.STOP_FILE).parent, *older]
        return [name for place in places for name in sweep_temporary(place)]

    def say(self, words: LastWords) -> None:
        """Leave last words, durably, and an event of the same content."""
        write_last_words(self.directory, words, self._rank)
        self.journal.append(words.ending, step=words.step, reason=words.reason or words.message)
        self.journal.sync()

    def say_failed(self, error: BaseException, step: int, checkpoint: str | None) -> None:
        """Leave last words about `error`. If even that fails (a full disk), `error` still is the news."""
        try:
            self.say(failure_words(error, step, checkpoint))
        except StorageError as silenced:
            error.add_note(f"its last words could not be written: {silenced.message}")

    def tell(self, *lines: str) -> None:
        """Say something on stderr that all ranks would say alike."""
        tell(*lines)

    def alarm(self, what: str, text: str, hint: str = "") -> None:
        """Tell people of something that is not well, also those whom only the supervisor can reach.

        `what` names its kind in a word or two, such as "spike".
        """
        tell(text, *([hint] if hint else []))
        self.journal.append("alarm", what=what, text=text, hint=hint)
        with Journal(self.directory / layout.ALARMS_FILE) as alarms:
            alarms.append("alarm", what=what, text=text, hint=hint)

    def close(self) -> None:
        """Release the run."""
        self.journal.close()
        if self._stacks is not None:
            self._stacks.close()
        self.heartbeat.close()
        if self._lock is not None:
            self._lock.release()


class FollowingAttempt(Attempt):
    """A further rank in an attempt that the first one has opened: it writes records of its own alone."""

    def __init__(self, directory: Path, rank: int, number: int, run: RunIdentity) -> None:
        self.run, self.number = run, number
        self.run_directory = directory
        self.directory = layout.attempt_directory(directory, number)
        self._rank = rank
        self.heartbeat = Heartbeat(self.directory / layout.of_rank(layout.HEARTBEAT, rank))
        self.journal = Journal(self.directory / layout.events_file(rank))
        is_supervised = given_attempt(directory) is not None
        self._stacks = StackFile(self.directory, rank) if is_supervised else None
        self._lock = None

    def sweep(self) -> list[str]:
        return []

    def tell(self, *lines: str) -> None:
        """The first rank says it."""

    def alarm(self, what: str, text: str, hint: str = "") -> None:
        """Keep it on record; the first rank tells people."""
        self.journal.append("alarm", what=what, text=text, hint=hint)


def say_refused(directory: Path, error: Exception) -> None:
    """Leave last words for an attempt that could not even open its run.

    Only under a supervisor, which made the attempt's directory: nobody else's is touched.
    """
    try:
        number = given_attempt(directory)
    except UsageError:
        return
    if number is not None:
        write_last_words(layout.attempt_directory(directory, number), failure_words(error, 0, None))


def failure_words(error: BaseException, step: int, checkpoint: str | None) -> LastWords:
    """Return last words about `error`: what it is, where in the user's code, what to do."""
    return LastWords(
        ending="failed",
        step=step,
        checkpoint=checkpoint,
        kind=error.kind if isinstance(error, UnbrokenError) else type(error).__name__,
        exit_code=_exit_code(error),
        message=_shortened(str(error)),
        hint=error.hint if isinstance(error, UnbrokenError) else "",
        frame=_own_frame(error),
    )


def _shortened(message: str) -> str:
    """Return `message` without its middle if it is long: what went wrong may stand on its last line."""
    if len(message) <= _MAX_MESSAGE:
        return message
    half = _MAX_MESSAGE // 2
    return f"{message[:half]}\n[...]\n{message[-half:]}"


def _rank() -> int:
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isascii() and rank.isdecimal() else 0


def _exit_code(error: BaseException) -> int:
    if isinstance(error, UnbrokenError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 130
    code = getattr(error, "code", None)
    return code if isinstance(error, SystemExit) and isinstance(code, int) else EXIT_ERROR


def _own_frame(error: BaseException) -> str:
    """Return `file:line in function` of the innermost frame of the user's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if not frame.filename.startswith(_OWN_SOURCE)
        and f"{os.sep}site-packages{os.sep}" not in frame.filename
    ]
    if not own:
        return ""
    return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}"
