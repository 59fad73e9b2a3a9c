"""What each rank adds to a checkpoint: where it differs from the first one, and nothing else.

Weights and what optimizers keep are taken to be alike on all ranks, as data parallel training makes them,
and that is checked now and then. All else is each rank's own: its random generators, its place in the data,
running statistics, plain objects. Of these a rank sends what is not, byte for byte, as on the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import msgspec

from unbroken.checkpoint.digest import digest
from unbroken.checkpoint.manifest import PartEntry, Position, RankEntry
from unbroken.checkpoint.ranks import path_of_rank
from unbroken.checkpoint.snapshot import Description
from unbroken.errors import UnsupportedStateError
from unbroken.state.paths import name_of, part_of
from unbroken.state.table import TensorTable
from unbroken.state.tensors import HostTensor, TensorSource, bytes_of, copy_bytes
from unbroken.training.ranks.group import Group

_FEW = 3
# The dtype, the shape and the digest of a tensor.
_Seen: TypeAlias = tuple[str, tuple[int, ...], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sight:
    """What one rank has, by digests: of the words of its parts, and of tensors with their kind."""

    parts: dict[str, str]
    tensors: dict[str, _Seen]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """What one rank adds: its position, and the words and tensors that differ."""

    position: Position
    parts: dict[str, PartEntry]
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]]
    sound: list[str]


class Shares:
    """Puts together what the ranks of a group have; a collective, each time that a state is captured."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._first_step: int | None = None
        self._captures = 0

    def put_together(self, description: Description, table: TensorTable) -> Description:
        """Return the description for all ranks, and enter their tensors in `table`, on the first rank.

        Raises UnsupportedStateError, on all ranks, if weights or the state of optimizers differ.
        """
        group = self._group
        if group.is_alone:
            return description
        own = _sight(description, table)
        first: _Sight = group.told(own)
        if self._is_check_due(description.step):
            mine = _alike(table)
            alike = group.told(mine)
            group.attempted(lambda: _check_alike(description.step, mine, alike))
        shares = group.collected(None if group.is_first else _share(description, table, own, first))
        if shares is None:
            return description
        return replace(description, ranks=tuple(_entries(shares, table)))

    def _is_check_due(self, step: int) -> bool:
        """Tell whether to look once more, more and more seldom: what drifts apart may begin alike."""
        if self._first_step is None:
            self._first_step = step
            return True
        if step == self._first_step:
            return False
        self._captures += 1
        return not self._captures & (self._captures - 1)


def _entries(shares: list[Any], table: TensorTable) -> Iterator[RankEntry]:
    for rank, share in enumerate(shares):
        if share is None:
            continue
        for path, (dtype, shape, data) in share.tensors.items():
            table.add(path_of_rank(rank, path), HostTensor(dtype, shape, memoryview(data)))
        # What has to be finite there, has to be so here.
        table.sound |= {path_of_rank(rank, path) for path in share.sound}
        yield RankEntry(parts=share.parts, position=share.position)


def _sight(description: Description, table: TensorTable) -> _Sight:
    return _Sight(
        parts={name: _digest_of(entry) for name, entry in description.parts.items()},
        tensors={path: _seen(source) for path, source in table.sources.items() if not _is_alike(path, table)},
    )


def _share(description: Description, table: TensorTable, own: _Sight, first: _Sight) -> _Share:
    differ = [path for path, seen in own.tensors.items() if seen != first.tensors.get(path)]
    # The position is each rank's own: with all of its tensors, also those that happen to be equal.
    differ = [*dict.fromkeys([*differ, *(path for path in own.tensors if part_of(path) == "position")])]
    sources = table.sources
    return _Share(
        position=description.position,
        parts={
            name: entry
            for name, entry in description.parts.items()
            if own.parts[name] != first.parts.get(name)
        },
        tensors={
            path: (sources[path].dtype, sources[path].shape, bytes(copy_bytes(sources[path])))
            for path in differ
        },
        sound=[path for path in differ if path in table.sound and path not in table.exempt],
    )


def _is_alike(path: str, table: TensorTable) -> bool:
    """Tell whether the tensor at `path` is one that training keeps the same on all ranks."""
    source = table.sources[path]
    return source.is_trained or source.is_frozen or part_of(path) in table.trained_parts


def _alike(table: TensorTable) -> dict[str, _Seen]:
    return {path: _seen(source) for path, source in table.sources.items() if _is_alike(path, table)}


def _check_alike(step: int, mine: Mapping[str, _Seen], first: Mapping[str, _Seen]) -> None:
    wrong = [path for path in mine.keys() | first.keys() if mine.get(path) != first.get(path)]
    if not wrong:
        return
    names = ", ".join(name_of(path) for path in sorted(wrong)[:_FEW])
    more = f" and {len(wrong) - _FEW} more" if len(wrong) > _FEW else ""
    raise UnsupportedStateError(
        f"step {step}: expected the same weights and the same state of optimizers on all ranks, "
        f"found that {names}{more} differ from rank 0",
        hint="train the same replica on every rank, by DistributedDataParallel or in the scope of a "
        "strategy, and keep whole optimizers; state that is sharded over ranks is not kept yet",
    )


def _seen(source: TensorSource) -> _Seen:
    return source.dtype, source.shape, digest(bytes_of(source))


def _digest_of(entry: PartEntry) -> str:
    return digest(msgspec.json.encode(entry))
