"""Every error that unbroken raises, grouped by what the caller can do about it.

    UnbrokenError
    |-- RetryableError              try again, later or elsewhere
    |   |-- StorageError            an operation on a storage failed
    |   |   |-- StorageFullError    no space, no inodes or no quota left
    |   |   `-- StorageDeniedError  missing rights, read-only or unreachable directory
    |   |-- RunBusyError            another process writes to this run
    |   `-- SaveFailedError         a checkpoint could not be written
    |-- UnhealthyError              training went wrong, and all that may be done about it was done
    |-- CheckpointError             use another checkpoint
    |   |-- DamagedError            bytes are not what was written
    |   |-- FormatVersionError      written by a newer release
    |   |-- NotFiniteError          NaN or infinity where training cannot go on from it
    |   `-- CheckpointNotFoundError nothing (of that name) to resume from
    `-- InputError                  fix what was handed in
        |-- UsageError              a wrong argument or command
        |-- NotRunningError         there is nothing to stop
        |-- NotARunError            the directory belongs to something else
        |-- UnsupportedStateError   an object whose state cannot be kept
        |-- StateMismatchError      the objects differ from what was saved
        `-- StaleWriterError        this attempt was superseded; it may not write

`kind` names the class of problem for programs, `exit_code` is what a process that fails with it
exits with, and `hint` says what to do next.
"""

from __future__ import annotations

from typing import ClassVar

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_DAMAGED = 3
EXIT_NOTHING_TO_RESUME = 4
EXIT_RUN_ME_AGAIN = 75
EXIT_DO_NOT_RESTART = 78


class UnbrokenError(Exception):
    """Base of all errors raised on purpose: `str(error)` is one line, `error.hint` the way out."""

    kind: ClassVar[str] = "error"
    exit_code: ClassVar[int] = EXIT_ERROR

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        # Shown below the message wherever Python prints a traceback.
        self.add_note(f"hint: {hint}")

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.hint))


def _rebuild(cls: type[UnbrokenError], message: str, hint: str) -> UnbrokenError:
    return cls(message, hint=hint)


class RetryableError(UnbrokenError):
    """The same call may succeed later."""

    kind = "retryable"


class StorageError(RetryableError):
    """An operation on a storage failed; what was there before is still there."""

    kind = "storage"


class StorageFullError(StorageError):
    """No space, no inodes or no quota left; nothing was written."""

    kind = "storage-full"


class StorageDeniedError(StorageError):
    """Missing rights, or a read-only or unreachable directory."""

    kind = "storage-denied"
    exit_code = EXIT_DO_NOT_RESTART


class RunBusyError(RetryableError):
    """Another process writes to this run."""

    kind = "run-busy"
    exit_code = EXIT_DO_NOT_RESTART


class SaveFailedError(RetryableError):
    """A checkpoint could not be written; the older ones are untouched."""

    kind = "save-failed"


class UnhealthyError(UnbrokenError):
    """Training went wrong, and what the user allows to be done about it did not help."""

    kind = "unhealthy"
    exit_code = EXIT_DO_NOT_RESTART


class CheckpointError(UnbrokenError):
    """This checkpoint cannot be used; another one may be."""

    kind = "checkpoint"


class DamagedError(CheckpointError):
    """Bytes on storage are not the bytes that were written."""

    kind = "damaged"
    exit_code = EXIT_DAMAGED


class FormatVersionError(CheckpointError):
    """Written by a newer release, in a format version this one does not know."""

    kind = "format-version"
    exit_code = EXIT_DO_NOT_RESTART


class NotFiniteError(CheckpointError):
    """NaN or infinity in what training makes: nothing can go on from that."""

    kind = "not-finite"
    exit_code = EXIT_DO_NOT_RESTART


class CheckpointNotFoundError(CheckpointError):
    """There is no checkpoint, or none of that name."""

    kind = "not-found"
    exit_code = EXIT_NOTHING_TO_RESUME


class InputError(UnbrokenError):
    """What was handed in must change; the same call will fail again."""

    kind = "input"
    exit_code = EXIT_DO_NOT_RESTART


class UsageError(InputError):
    """A wrong argument, option or command."""

    kind = "usage"
    exit_code = EXIT_USAGE


class NotRunningError(InputError):
    """What was asked for needs a run that is going on, and this one is not."""

    kind = "not-running"
    exit_code = EXIT_ERROR


class NotARunError(InputError):
    """The directory belongs to something else, or its run.json cannot be read."""

    kind = "not-a-run"


class UnsupportedStateError(InputError):
    """An object whose state cannot be kept exactly."""

    kind = "unsupported-state"


class StateMismatchError(InputError):
    """The live objects differ from those that were saved; nothing was changed."""

    kind = "state-mismatch"


class StaleWriterError(InputError):
    """A newer attempt of this run exists; this process may not write any more."""

    kind = "stale-writer"
