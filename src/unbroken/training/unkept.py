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
        self._parts = parts
        self._has_looked = False
        self._told: set[str] = set()
        self._watch = families.watch(values)

    def is_step_complete(self) -> bool:
        """Tell whether an optimizer has stepped since this was asked last; True where nobody can know."""
        return self._watch is None or self._watch.take_stepped()

    def check(self) -> None:
        """Look when the first step is complete, and whenever another optimizer has come into use.

        Raises UnsupportedStateError for an optimizer or a scheduler at work that is no part.
        """
        if self._has_looked and (self._watch is None or not self._watch.has_news):
            return
        self._has_looked = True
        lost = [text for text, is_certain in self._lost() if is_certain]
        if lost:
            raise UnsupportedStateError(
                "not kept: " + "; ".join(lost),
                hint="pass it to Run by a keyword, such as optimizer= or scheduler=",
            )
        self.tell()

    def tell(self) -> None:
        """Say what changes and is not kept, each thing once."""
        for line in (*(text for text, _ in self._lost()), *self._parts.unkept_changes()):
            if line not in self._told:
                self._told.add(line)
                tell(f"not kept: {line}")

    def close(self) -> None:
        """Look no more."""
        if self._watch is not None:
            self._watch.close()

    def _lost(self) -> list[tuple[str, bool]]:
        return [] if self._watch is None else self._watch.lost()
