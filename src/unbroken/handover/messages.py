"""What the trainer and the writer process say to each other: one JSON object a message."""

from __future__ import annotations

import msgspec

from unbroken import errors
from unbroken.errors import StorageError, UnbrokenError
from unbroken.handover.committer import Committed

MAX_MESSAGE_BYTES = 1 << 16
_MAX_TEXT = 4000


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What the writer process is told on its command line.

    `parent` is the newest checkpoint, whose bytes were verified or written by this trainer; snapshots up to
    the number `sequence` are checkpoints already. `look` is the module that tells what is not finite.
    """

    directory: str
    attempt: int
    trainer: dict[str, str | int]
    parent: str | None = None
    sequence: int = 0
    look: str | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """`do` is "slot" (a new slot, whose descriptor comes along), "commit", "verify", "read-back" or "end"."""

    do: str
    number: int = 0
    slot: int = 0
    name: str = ""
    sampled: bool = False


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An error of ours: the name of its class, and what it says."""

    error: str
    message: str
    hint: str


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to the request of that number; 0 is the greeting of a process that is ready."""

    number: int = 0
    name: str = ""
    step: int = 0
    not_finite: str = ""
    invalid: str = ""
    is_intact: bool = False
    damage: str = ""
    failure: Failure | None = None


def reply_of(committed: Committed, number: int) -> Reply:
    """Return what is said of a checkpoint that was written."""
    return Reply(
        number=number,
        name=committed.name,
        step=committed.step,
        not_finite=committed.not_finite[:_MAX_TEXT],
        invalid=committed.invalid[:_MAX_TEXT],
    )


def committed_of(reply: Reply) -> Committed:
    """Return the checkpoint that was written, as `reply` tells."""
    return Committed(name=reply.name, step=reply.step, not_finite=reply.not_finite, invalid=reply.invalid)


def failure_of(error: UnbrokenError) -> Failure:
    """Return `error` as it is sent."""
    return Failure(error=type(error).__name__, message=error.message[:_MAX_TEXT], hint=error.hint[:_MAX_TEXT])


def raised(failure: Failure) -> UnbrokenError:
    """Return the error that was sent."""
    found = getattr(errors, failure.error, StorageError)
    assert issubclass(found, UnbrokenError), failure.error
    return found(failure.message, hint=failure.hint)
