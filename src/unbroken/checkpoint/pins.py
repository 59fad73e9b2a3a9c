"""Pins: checkpoints that no prune may delete, by name, in one small file of the run."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from unbroken.errors import CheckpointNotFoundError, DamagedError
from unbroken.rundir import layout
from unbroken.storage.base import Storage
from unbroken.storage.failures import failed
from unbroken.storage.local import LocalStorage

_FORMAT = "unbroken-pins"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A pinned checkpoint: why, in the words of who pinned it, and since when, as a time in UTC."""

    name: str
    note: str
    pinned: str

    def __str__(self) -> str:
        return f"pinned: {self.note}" if self.note else "pinned"


def read_pins(storage: Storage) -> dict[str, Pin]:
    """Return `name -> pin` in the order of pinning; empty if nothing was ever pinned.

    Raises DamagedError if the file is not what was written: which checkpoints are pinned is not known.
    """
    if layout.PINS_FILE not in storage.list():
        return {}
    data = bytes(storage.read(layout.PINS_FILE))
    try:
        value = json.loads(data)
        if value["format"] != _FORMAT:
            raise ValueError(f"format {value['format']!r}")
        return {str(name): _pin(str(name), words) for name, words in value["pins"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedError(
            f"{layout.PINS_FILE}: expected the pins of a run, found other bytes "
            f"({type(error).__name__}: {error})",
            hint=f"restore {layout.PINS_FILE} from a copy; or move it away, and pin again what you need",
        ) from error


def pin(storage: Storage, name: str, note: str, *, exists: Callable[[str], bool]) -> Pin:
    """Pin the checkpoint `name`, with a new note if it is pinned already.

    `exists` tells whether there is a checkpoint of that name. Raises CheckpointNotFoundError if there
    is none (any more), DamagedError if the pins cannot be read.
    """
    new = Pin(name=name, note=note, pinned=datetime.now(UTC).isoformat(timespec="seconds"))
    with held(storage, wait=True):
        before = read_pins(storage)
        if exists(name):
            _write(storage, {**before, name: new})
            # Where pins cannot be held, a prune may have been faster.
            if exists(name):
                return new
            _write(storage, before)
    raise CheckpointNotFoundError(
        f"{storage}: expected checkpoint {name!r}, found none of that name",
        hint="`unbroken ls` lists the checkpoints of a run",
    )


def unpin(storage: Storage, name: str) -> Pin | None:
    """Remove the pin of `name` and return it, or None if it was not pinned. Raises DamagedError."""
    with held(storage, wait=True):
        pins = read_pins(storage)
        old = pins.pop(name, None)
        if old is not None:
            _write(storage, pins)
        return old


@contextmanager
def held(storage: Storage, *, wait: bool) -> Iterator[bool]:
    """Keep others from changing pins in this block; False, without `wait`, if another one is at it.

    Where a storage has no such locks the block runs all the same.
    """
    if not isinstance(storage, LocalStorage):
        yield True
        return
    try:
        # The directory itself, so that no further file lies in it.
        descriptor = os.open(storage.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        yield True
        return
    except OSError as error:
        raise failed("hold the pins of", storage.root, error) from error
    try:
        is_ours = _locked(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        try:
            yield is_ours
        finally:
            # Said aloud: a process forked meanwhile has this descriptor, too, and would keep the lock.
            _locked(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _locked(descriptor: int, operation: int) -> bool:
    try:
        fcntl.flock(descriptor, operation)
    except BlockingIOError:
        return False
    except OSError:
        # No such locks on this file system: who pins then looks once more whether it was in time.
        return True
    return True


def _pin(name: str, words: dict[str, Any]) -> Pin:
    return Pin(name=name, note=str(words["note"]), pinned=str(words["pinned"]))


def _write(storage: Storage, pins: dict[str, Pin]) -> None:
    value = {
        "format": _FORMAT,
        "pins": {one.name: {"note": one.note, "pinned": one.pinned} for one in pins.values()},
    }
    storage.write(layout.PINS_FILE, [json.dumps(value, indent=1, ensure_ascii=False).encode() + b"\n"])
