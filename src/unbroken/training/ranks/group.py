"""The ranks that train together agree: the first one decides, and all do the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast, get_args

from unbroken.errors import UnbrokenError, UsageError
from unbroken.training import families

_T = TypeVar("_T")
Where = Literal[
    "in step",
    "before the next batch, after step",
    "at the end of an epoch, after step",
    "outside of a loop, after step",
    "at the end, after step",
]
_PLACES = get_args(Where)
_MOST_WORDS = 3


class Group:
    """All ranks of a run, of which this process is one; each method is called by all at the same place.

    A run of one process is a group of one, in which nobody has to be asked.
    """

    def __init__(self, ranks: Any = None) -> None:
        self._ranks = ranks
        self.rank: int = 0 if ranks is None else ranks.rank
        self.size: int = 1 if ranks is None else ranks.world_size

    @property
    def is_alone(self) -> bool:
        """Whether this process is all of the run."""
        return self._ranks is None

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that decides and writes."""
        return self.rank == 0

    def decided(self, decide: Callable[[], _T]) -> _T:
        """Return on all ranks what `decide` returns on the first; an error of ours there is raised on all."""
        if self._ranks is None:
            return decide()
        if not self.is_first:
            told = self._ranks.broadcast(None)
            if isinstance(told, UnbrokenError):
                raise _of_rank(0, told)
            return cast("_T", told)
        try:
            value = decide()
        except UnbrokenError as error:
            self._ranks.broadcast(error)
            raise
        self._ranks.broadcast(value)
        return value

    def attempted(self, act: Callable[[], _T]) -> _T:
        """Return what `act` returns here if it ends well everywhere; else raise its error, or another's.

        What is no error of ours is a UsageError on the others.
        """
        if self._ranks is None:
            return act()
        value: Any = None
        mine: Exception | None = None
        try:
            value = act()
        except Exception as error:  # noqa: BLE001 - raised below, when the others know
            mine = error
        told = self._ranks.gather(None if mine is None else _as_told(mine))
        if mine is not None:
            raise mine
        for rank, theirs in enumerate(told):
            if theirs is not None:
                raise _of_rank(rank, theirs)
        return cast("_T", value)

    def votes(self, where: Where, step: int, *mine: bool) -> list[list[bool]]:
        """Return what all ranks say, in order, each as many words, three at most: one small collective.

        Raises UsageError if they are not all at the same place, at the same step. What ranks have to say to
        each other begins with this, since of other collectives that do not match some end the process.
        """
        if self._ranks is None:
            return [list(mine)]
        words = [*mine, *[False] * (_MOST_WORDS - len(mine))]
        found = self._ranks.numbers([_PLACES.index(where), step, *words])
        places = [(_PLACES[one[0]], one[1]) for one in found]
        if len(set(places)) > 1:
            raise UsageError(
                "expected all ranks to be at the same step, found "
                + ", ".join(f"rank {rank} {where} {step}" for rank, (where, step) in enumerate(places)),
                hint="call run.step on every rank, once for each step of all; give every rank as many "
                "batches, and leave a loop on all of them at the same place",
            )
        return [[bool(word) for word in one[2 : 2 + len(mine)]] for one in found]

    def gathered(self, value: _T) -> list[_T]:
        """Return the values of all ranks, in order."""
        return [value] if self._ranks is None else self._ranks.gather(value)

    def collected(self, value: _T) -> list[_T] | None:
        """Return the values of all ranks to the first one, None to the others."""
        return [value] if self._ranks is None else self._ranks.collect(value)

    def told(self, value: _T) -> _T:
        """Return on all ranks the value of the first."""
        return value if self._ranks is None else self._ranks.broadcast(value)


def this_group() -> Group:
    """Return the group that this process is in.

    Raises UsageError if it is one of several, and another one does not come here in time.
    """
    ranks = families.ranks()
    if ranks is not None:
        ranks.meet()
    return Group(ranks)


def _as_told(error: Exception) -> UnbrokenError:
    if isinstance(error, UnbrokenError):
        return error
    return UsageError(f"{type(error).__name__}: {error}", hint="see what that rank has printed")


def _of_rank(rank: int, error: UnbrokenError) -> UnbrokenError:
    return type(error)(f"rank {rank}: {error.message}", hint=error.hint)
