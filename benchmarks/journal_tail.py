"""When a save of unbroken is durable: its journal says so."""

from __future__ import annotations

import json

import unbroken


class JournalTail:
    """Follows the journal of a run: `saved` is written there when a checkpoint is committed and durable."""

    def __init__(self, live: unbroken.Run) -> None:
        newest = max((live.directory / "attempts").glob("*/events-rank0.jsonl"))
        self._stream = newest.open("rb")
        self._stream.seek(0, 2)
        self._line = b""

    def has_saved(self) -> bool:
        """Return whether another save has ended since the last one that was found. Raises if it failed."""
        while more := self._stream.readline():
            self._line += more
            if not more.endswith(b"\n"):
                return False
            event, self._line = json.loads(self._line), b""
            if event["kind"] == "save-failed":
                raise RuntimeError(event["message"])
            if event["kind"] == "saved":
                return True
        return False
