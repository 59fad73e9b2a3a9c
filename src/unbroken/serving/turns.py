"""One value after another, each in use until all who took it are done with it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class _Turn(Generic[_T]):
    value: _T
    users: int = 0


class Turns(Generic[_T]):
    """The current value, which its users keep as long as they want, and the one before it."""

    def __init__(self, value: _T) -> None:
        self._current = _Turn(value)
        self._before: _Turn[_T] | None = None
        self._changed = threading.Condition()
        self._is_closed = False

    @property
    def current(self) -> _T:
        return self._current.value

    @contextmanager
    def using(self) -> Iterator[_T]:
        """Use the current value in this block, whatever becomes current meanwhile."""
        with self._changed:
            turn = self._current
            turn.users += 1
        try:
            yield turn.value
        finally:
            with self._changed:
                turn.users -= 1
                if turn is self._before and not turn.users:
                    self._changed.notify_all()

    def wait_until_left(self) -> bool:
        """Return when nobody uses the value before the current one any more; False if closed meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._before is None or not self._before.users)
            return not self._is_closed

    def switch(self, value: _T) -> None:
        """Make `value` the current one for all who come from now on; the one before it has been left."""
        with self._changed:
            assert self._before is None or not self._before.users, "the value before is still in use"
            self._before, self._current = self._current, _Turn(value)

    def close(self) -> None:
        """Let nobody wait any longer."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
