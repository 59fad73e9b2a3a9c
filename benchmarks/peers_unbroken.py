"""unbroken as a script uses it: a run with a model and an optimizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from peers import IsDurable, Peer
from torch_state import TorchState, build

import unbroken

__all__ = ["build"]


@contextmanager
def run(state: TorchState, directory: Path) -> Iterator[Peer]:
    """A run below `directory`; whatever directory a save is given, its checkpoints go there."""
    with ExitStack() as stack:
        # Retention is not what is measured: nothing is pruned.
        live = unbroken.Run(directory / "run", save=[], keep=[], **state.parts)
        events: list[JournalTail] = []

        def prepare() -> None:
            stack.enter_context(live)
            events.append(JournalTail(live))

        def save(path: Path) -> IsDurable:
            live.step()
            live.save()
            return events[0].has_saved

        def load(path: Path) -> None:
            stack.enter_context(live)

        yield Peer(save=save, load=load, prepare=prepare)


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
