"""What to say where a resume reads consumed items again: the cost, and what may not be repeated."""

from __future__ import annotations

from typing import Any

from unbroken.frameworks.own_state import shuffle_buffer
from unbroken.frameworks.rng import capture_global_rng
from unbroken.rundir.tell import tell

# Draws that matter show at once; looking costs some tens of microseconds.
_LOOKS = 8


def told_of_reading(items: object, *, workers: int = 0) -> str:
    """Return what to tell about an iterable without a state of its own."""
    kind = type(items).__name__
    buffer = shuffle_buffer(items)
    if buffer:
        why = f"the state of {kind} leaves out its shuffle buffer of {buffer} rows"
    else:
        why = f"{kind} has no state_dict and load_state_dict that say how far it is read"
    where = " in each worker" if workers else ""
    return (
        f"batches: {why}: a resume inside an epoch reads its consumed items again{where}, which takes as "
        "long as reading them did; it is exact if they depend only on the data and on random generators"
    )


class DrawWatch:
    """Looks who draws from the generators of the process as a pass begins: its start, its items, training.

    With `is_read_again`, says so once if reading items and training do so in turn: reading them again, nobody
    draws what training drew between two items.
    """

    def __init__(self, items: object, *, is_read_again: bool = True, items_draw: bool | None = None) -> None:
        self.start_draws = False
        # Of all items but the first, which comes with what the start draws; None before there is one.
        self.items_draw = items_draw
        self._kind = type(items).__name__
        self._is_read_again = is_read_again
        self._looks = _LOOKS
        self._before: dict[str, Any] = {}
        self._after: dict[str, Any] | None = None

    def before(self) -> None:
        """Look before items are read."""
        if self._looks:
            self._before = capture_global_rng()

    def after(self) -> None:
        """Look when they are read."""
        if not self._looks:
            return
        self._looks -= 1
        earlier, self._after = self._after, capture_global_rng()
        has_drawn = self._after != self._before
        if earlier is None:
            self.start_draws = has_drawn
            return
        self.items_draw = self.items_draw or has_drawn
        if self._is_read_again and has_drawn and earlier != self._before:
            self._looks = 0
            tell(
                f"batches: reading {self._kind} draws from the random generators of the process, and so does "
                "training in between. After a resume inside an epoch its order may be another one, if it "
                "depends on those draws: give it a generator of its own, or a state_dict and load_state_dict"
            )
