"""A sampler whose global order is the same for any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from unbroken.errors import StateMismatchError, UsageError
from unbroken.frameworks.torch.permutation import Permutation, indices_at


class ElasticSampler(Sampler[int]):
    """Gives each rank its share of one global order, which depends on the seed and the epoch alone.

        sampler = unbroken.ElasticSampler(data, seed=7)
        loader = DataLoader(data, batch_size=32, sampler=sampler)

    Rank r of W takes the places r, r + W, r + 2W... of what the epoch has left, so that W ranks with
    batches of B train on the same W * B samples in a step as one rank with batches of W * B. What is kept
    is the epoch and the global position, two numbers: a run that goes on with another number of ranks
    takes the rest of the same order. All ranks are expected to have taken as many samples.

    Every index comes once in an epoch, over all ranks. Where the world size does not divide what is left,
    the first ranks get one sample more, which may be one batch more: with `drop_last` those samples are
    left out, with `pad` the other ranks get samples from the front of the order again.

    Rank and world size are those of torch.distributed, else of the variables RANK and WORLD_SIZE that
    torchrun sets, else one of one. Epochs are counted from 0, or set by `set_epoch`.

    Raises:
        UsageError: the rank is not below the world size, or only one of the two is given.
    """

    def __init__(
        self,
        data: Sized,
        *,
        seed: int = 0,
        shuffle: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
        pad: bool = False,
    ) -> None:
        self.rank, self.world_size = _place(rank, world_size)
        if drop_last and pad:
            raise UsageError(
                "ElasticSampler: expected drop_last or pad, found both",
                hint="either leave the last samples out, or repeat some of the first",
            )
        self.length = len(data)
        self.seed, self.shuffle, self.drop_last, self.pad = seed, shuffle, drop_last, pad
        self.epoch = 0
        self._next = (0, 0)  # epoch and global position at which the next iteration begins
        self._begun: tuple[int, int] | None = None  # those of the one under way
        self._drawn = 0
        self.is_epoch_set = False  # whether the script has set the epoch of the next iteration

    def __len__(self) -> int:
        """The number of samples that this rank gets in a whole epoch."""
        return len(self.places(0))

    def __iter__(self) -> Iterator[int]:
        # All happens at the first index: torch begins an iteration that it does not use.
        yield from self.iterate_from(*self._next)

    def iterate_from(self, epoch: int, position: int) -> Iterator[int]:
        """Yield this rank's indices of `epoch` from the global `position` on; the next epoch comes after."""
        self._next, self._begun, self._drawn = (epoch + 1, 0), (epoch, position), 0
        self.epoch, self.is_epoch_set = epoch, False
        for index in self.order(epoch, self.places(position)):
            self._drawn += 1
            yield index
        self._begun = None

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is of; the rest of it, if that is what was restored."""
        if epoch != self._next[0]:
            self._next = (epoch, 0)
        self.epoch, self.is_epoch_set = epoch, True

    @property
    def next_place(self) -> tuple[int, int]:
        """The epoch and the global position at which the next iteration begins."""
        return self._next

    def place_after(self, begun: tuple[int, int], consumed: int) -> tuple[int, int]:
        """Return epoch and global position after `consumed` samples of this rank since the place `begun`.

        The end of an epoch is a position of its own, the length.
        """
        epoch, start = begun
        is_all = consumed >= len(self.places(start))
        return epoch, self.length if is_all else start + consumed * self.world_size

    def state_dict(self) -> dict[str, Any]:
        """Return epoch and global position after the indices that were taken from this sampler.

        A loader with workers takes more than training has consumed; `run.batches` knows how many were.
        """
        epoch, position = self._next
        if self._begun is not None:
            epoch, position = self.place_after(self._begun, self._drawn)
        if position >= self.length:
            epoch, position = epoch + 1, 0
        return {"epoch": epoch, "position": position, **self._settings()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration begin at the epoch and position of `state`, whatever its world size.

        Raises:
            StateMismatchError: its order is another one.
        """
        found = self._settings()
        differences = [
            f"{name}: checkpoint has {state.get(name)!r}, found {found[name]!r}"
            for name in found
            if state.get(name) != found[name]
        ]
        if differences:
            raise StateMismatchError(
                "ElasticSampler: " + "; ".join(differences),
                hint="resume with the data and the seed of the original run",
            )
        self.begin_at(state["epoch"], state["position"])

    def begin_at(self, epoch: int, position: int) -> None:
        """Let the next iteration begin at a global `position` of `epoch`."""
        self._next, self._begun = (epoch, position), None
        self.epoch, self.is_epoch_set = epoch, False

    def places(self, position: int) -> range:
        """Return this rank's places in the global order, from the global `position` to the epoch's end."""
        left = self.length - position
        if self.drop_last:
            left -= left % self.world_size
        elif self.pad:
            left += -left % self.world_size
        return range(position + self.rank, position + left, self.world_size)

    def order(self, epoch: int, places: range) -> Iterator[int]:
        """Yield the indices at `places` of the global order of `epoch`."""
        permutation = Permutation(self.length, seed=self.seed, epoch=epoch) if self.shuffle else None
        return indices_at(places, permutation, self.length)

    def _settings(self) -> dict[str, Any]:
        return {"length": self.length, "seed": self.seed, "shuffle": self.shuffle}


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise UsageError(
            f"ElasticSampler: expected rank and world_size, found rank={rank}, world_size={world_size}",
            hint="give both, or none to take those of torch.distributed or torchrun",
        )
    if rank is None or world_size is None:
        rank, world_size = _place_here()
    if not 0 <= rank < world_size:
        raise UsageError(
            f"ElasticSampler: expected a rank from 0 to {world_size - 1}, found {rank}",
            hint="ranks are counted from 0",
        )
    return rank, world_size


def _place_here() -> tuple[int, int]:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
