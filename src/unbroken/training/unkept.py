"""What changes while training runs and is in no checkpoint: found early, said once, or refused."""

from __future__ import annotations

from collections.abc import Mapping

from unbroken.errors import UnsupportedStateError
from unbroken.rundir.tell import tell
from unbroken.training import families
from unbroken.training.parts import Parts


class UnkeptWatch:
    """Looks on while training runs, at `values`, which are the live objects of `parts`."""

    def __init__(self, values: Mapping[str, object], parts: Parts) -> None:
        self.has_looked = False
        self._told: set[str] = set()
        self._parts = parts
        self._watch = families.watch(values)

    def check(self) -> None:
        """Look for the first time, when a step is complete.

        Raises UnsupportedStateError for an optimizer or a scheduler at work that is no part.
        """
        self.has_looked = True
        lost = self._lost()
        # An object that keeps its own state may hold it; nobody else can tell.
        if lost and not self._parts.are_opaque:
            raise UnsupportedStateError(
                "not kept: " + "; ".join(lost),
                hint="pass it to Run by a keyword, such as optimizer= or scheduler=",
            )
        self.tell()

    def tell(self) -> None:
        """Say what changes and is not kept, each thing once."""
        for line in (*self._lost(), *self._parts.unkept_changes()):
            if line not in self._told:
                self._told.add(line)
                tell(f"not kept: {line}")

    def close(self) -> None:
        """Look no more."""
        if self._watch is not None:
            self._watch.close()

    def _lost(self) -> list[str]:
        return [] if self._watch is None else self._watch.lost()
