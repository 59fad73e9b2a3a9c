"""An append-only file of JSON lines: one event a line, torn at worst where its writer died or failed."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from unbroken.storage.failures import failed

# The `what` of an alarm that is good news: what others told of is over.
OVER = "over"


class Journal:
    """Appends events to the file at `path`, from any thread.

    Every event is an object with `time` (seconds since 1970), `kind` and its own fields. Floats that
    JSON lacks are written as the strings "nan", "inf" and "-inf".

        with Journal(path) as journal:
            journal.append("step", step=7, loss=0.25)
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(path, flags, 0o666)
            size = os.fstat(self._descriptor).st_size
            # A line whose writer was killed in the middle of it has no end; see `append`.
            self._is_torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"
        except OSError as error:
            raise failed("open", path, error) from error

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def append(self, kind: str, /, **fields: Any) -> None:
        """Append one event. It survives the death of this process, and a power loss after `sync`.

        Raises StorageError, StorageFullError among them: this event is lost, none before or after it.
        """
        event = {"time": round(time.time(), 6), "kind": kind, **fields}
        line = json.dumps(finite(event), separators=(",", ":")).encode() + b"\n"
        with self._lock:
            self._write(line)

    def sync(self) -> None:
        """Make all events durable. Raises StorageError."""
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise failed("sync", self.path, error) from error

    def close(self) -> None:
        """Release the file; closing twice is no error."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, line: bytes) -> None:
        # A torn line is ended first, or this event would be lost with it.
        rest = memoryview(b"\n" + line if self._is_torn else line)
        self._is_torn = True
        try:
            # One call, but for a disk that is about to be full: that takes only a part.
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            raise failed("append to", self.path, error) from error
        self._is_torn = False


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events in the file at `path`, oldest first; none if there is no file.

    Lines that a dying writer or a full disk tore are passed over: they never were events.
    """
    try:
        file = path.open("rb")
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise failed("read", path, error) from error
    with file:
        for line in file:
            event = parse_event(line)
            if event is not None:
                yield event


def number(value: object) -> float | None:
    """Return the float that an event's field stands for, or None if it is no number."""
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    return nearest_float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def nearest_float(value: int | float) -> float:
    """Return `value` as a float; an integer beyond the range of floats is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def parse_event(line: bytes) -> dict[str, Any] | None:
    """Return the event in a line, or None if it is torn."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("kind"), str) else None


def finite(value: Any) -> Any:
    """Return `value` with the floats that JSON lacks as the strings "nan", "inf" and "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
