"""unbroken as a script uses it: a run with a model and an optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from journal_tail import JournalTail
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
