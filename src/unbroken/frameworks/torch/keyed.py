"""A DataLoader whose randomness is keyed: order and samples depend on seed, epoch and position alone.

The order of an epoch is a permutation by (seed, epoch). Each sample is read under generators seeded by (seed,
epoch, position in that order), and each batch is collated under ones seeded by its first position. Nothing is
left that depends on the number of workers or ranks or on how the order is cut into batches, and nothing has
to be replayed: a position is three numbers.

The generators of the training process are not touched. Samples are read one by one, by `dataset[index]`.
A loader that is built anew is the same one: its seed and its place are all there is to it.
"""

from __future__ import annotations

import copy
import hashlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    get_worker_info,
)

from unbroken.errors import UnsupportedStateError, UsageError
from unbroken.frameworks.generators import HeldGenerators
from unbroken.frameworks.torch.delivered import Delivered
from unbroken.frameworks.torch.elastic_sampler import ElasticSampler
from unbroken.frameworks.torch.index_stream import is_plain
from unbroken.frameworks.torch.keyed_generators import put_back, seed_all
from unbroken.frameworks.torch.loader_checks import (
    check_same_loader,
    check_supported,
    check_wish,
    differences,
    fingerprint,
)
from unbroken.frameworks.torch.worker_side import iterator_of, parent_of_workers, prepare_worker, refuse_late
from unbroken.rundir.tell import tell


class Place(NamedTuple):
    """Where a sample stands: epoch, position in the global order, and its index in the dataset."""

    epoch: int
    position: int
    sample: int


class KeyedLoader:
    """The batches of a plain map-style DataLoader with keyed randomness; see the module.

        batches = KeyedLoader(DataLoader(data, batch_size=64, shuffle=True, num_workers=8), seed=7)
        for batch in batches.iterate():
            state = batches.state()

    Of the loader's sampler its kind counts: sequential, shuffled, or the share of a rank by
    DistributedSampler or ElasticSampler. Epochs are counted from 0.

    Without a `seed` it is the one of such a sampler, which all ranks share. Of any other loader it is made
    of the seed of its generator, or of torch's, and of `name`; a position that is restored brings its own.
    By their names loaders draw other numbers also where they share a seed; their order is then the same.

    Raises:
        UnsupportedStateError: the loader's order is not a permutation of its data that batches are cut from.
    """

    def __init__(self, loader: DataLoader[Any], *, seed: int | None = None, name: str = "") -> None:
        _check_keyed(loader)
        self._loader, self._name = loader, name
        given = _shared_seed(loader) if seed is None else seed
        self._has_given_seed = given is not None
        self._take_seed(_made_seed(loader, name) if given is None else given)
        self._place: tuple[int, int] | None = None  # where the iteration under way began
        self._consumed = 0
        self._delivered = Delivered()
        self._copy: tuple[DataLoader[Any], _Batches] | None = None
        self._iteration = 0
        self._restored: dict[str, Any] | None = None

    def __len__(self) -> int:
        return len(self._loader)

    def generators(self) -> list[object]:
        """Return nothing: no generator has a state that matters."""
        return []

    def samples(self, back: int) -> list[Any] | None:
        """Return the indices in the batch handed out `back` batches ago; see `ResumableLoader.samples`."""
        return self._delivered.samples(back)

    def state(self) -> dict[str, Any]:
        """Return the position after the last batch that was handed out, as plain values."""
        if self._restored is not None:
            return dict(self._restored)
        is_between = self._place is None
        epoch, position = self._shares.next_place
        if self._place is not None:
            epoch, position = self._shares.place_after(self._place, self._consumed)
            position = self._without_cut_off(position)
        return {
            "keyed": {"seed": self._seed, "epoch": epoch, "position": position, "name": self._name},
            "samples": position,
            "between_epochs": is_between,
            "fingerprint": self._fingerprint(),
            "has_begun": self._iteration > 0,
            "generators": {},
            "workers_start": None,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a position; the loader may have other workers, batches and ranks than it was taken with.

        Raises:
            StateMismatchError: inside an epoch, the data, the seed or the kind of the order is another one.
        """
        if "keyed" not in state:
            raise UsageError(
                "loader: expected a position with keyed randomness, found one of the loader's own randomness",
                hint="go on with the randomness that the run began with, or start a new run directory",
            )
        kept = state["keyed"]
        # One that came since would change the samples of a run that goes on.
        self._name = kept.get("name", "")
        if not self._has_given_seed:
            self._take_seed(kept["seed"])
        saved, found = state["fingerprint"], self._fingerprint()
        if not state["between_epochs"]:
            check_same_loader(saved, found)
        elif changes := differences(saved, found):
            tell(f"loader: {'; '.join(changes.values())}: the next epoch begins with it")
        self._restored = dict(state)
        self._shares.begin_at(kept["epoch"], kept["position"])

    def iterate(
        self, *, inside_epoch: bool = False, after_replay: Callable[[], None] | None = None
    ) -> Iterator[Any]:
        """Begin the next epoch, or go on in the restored one; see `ResumableLoader.iterate`."""
        self._check_wish(inside_epoch)
        restored, self._restored = self._restored, None
        self._end(self._iteration)
        if after_replay is not None:
            after_replay()
        if inside_epoch and restored is not None and restored["between_epochs"] and restored["has_begun"]:
            return iter(())
        place = self._shares.next_place
        batches = self._open(place)
        self._place, self._consumed, self._delivered = place, 0, Delivered()
        self._iteration += 1
        return self._drive(batches, self._iteration)

    def _without_cut_off(self, position: int) -> int:
        """Return `position`, or the end of the epoch if the loader drops all that is left."""
        batch_sampler = cast("Any", self._loader.batch_sampler)
        is_dropped = len(self._shares.places(position)) < batch_sampler.batch_size
        return self._shares.length if batch_sampler.drop_last and is_dropped else position

    def _take_seed(self, seed: int) -> None:
        self._seed, self._shares = seed, _shares(self._loader, seed)

    def _check_wish(self, inside_epoch: bool) -> None:
        restored = self._restored
        if restored is not None:
            kept = restored["keyed"]
            check_wish({**restored, "epoch": kept["epoch"], "batches": kept["position"]}, inside_epoch)
        else:
            check_wish(None, inside_epoch)

    def _open(self, place: tuple[int, int]) -> Iterator[Any]:
        if self._copy is None or not self._loader.persistent_workers:
            self._copy = self._make_copy()
        twin, source = self._copy
        source.begin(place)
        return iterator_of(twin)

    def _make_copy(self) -> tuple[DataLoader[Any], _Batches]:
        loader = self._loader
        side = KeyedSide(
            loader.dataset,
            collate_fn=loader.collate_fn,
            worker_init_fn=loader.worker_init_fn,
            seed=f"{self._name}/{self._seed}" if self._name else str(self._seed),
            parent=parent_of_workers(loader),
        )
        source = _Batches(self._shares, cast("BatchSampler", loader.batch_sampler))
        twin = copy.copy(loader)
        vars(twin).update(
            dataset=side,
            batch_sampler=source,
            collate_fn=_as_it_is,
            worker_init_fn=side.start_worker,
            # What torch draws for its workers comes from nowhere that anybody else draws from.
            generator=torch.Generator(),
            _iterator=None,
        )
        return twin, source

    def _drive(self, batches: Iterator[Any], iteration: int) -> Iterator[Any]:
        assert self._copy is not None
        in_flight = self._copy[1].in_flight
        try:
            for batch in batches:
                if iteration != self._iteration:
                    raise UsageError(
                        "loader: expected one iteration at a time, found a batch asked of an earlier one",
                        hint="wrap a second DataLoader to iterate twice at once",
                    )
                places = in_flight.popleft()
                self._delivered.add(places)
                self._consumed += len(places)
                yield batch
        except GeneratorExit:
            self._end(iteration)
            raise
        self._end(iteration)

    def _end(self, iteration: int) -> None:
        if iteration != self._iteration or self._place is None:
            return
        self._shares.begin_at(self._place[0] + 1, 0)
        self._place = None

    def _fingerprint(self) -> dict[str, object]:
        found = fingerprint(self._loader)
        data = {name: value for name, value in found.items() if name.startswith("dataset")}
        return {**data, "shuffle": self._shares.shuffle, "seed": self._seed}


class KeyedSide:
    """Dataset and worker_init_fn of the copied loader: reads and collates under keyed generators."""

    def __init__(
        self,
        dataset: Any,
        *,
        collate_fn: Callable[[Any], Any],
        worker_init_fn: Callable[[int], None] | None,
        seed: str,
        parent: int | None,
    ) -> None:
        self._dataset = dataset
        self._collate_fn = collate_fn
        self._worker_init_fn = worker_init_fn
        self._seed = seed
        self._parent = parent
        self._held: HeldGenerators | None = None
        self._batches = 0

    def __len__(self) -> int:
        return len(self._dataset)

    def start_worker(self, worker: int) -> None:
        prepare_worker(worker, self._dataset, self._worker_init_fn, self._parent)

    def __getitems__(self, places: Sequence[Place]) -> Any:
        if self._held is None:
            self._held = HeldGenerators({"dataset": self._dataset, "collate_fn": self._collate_fn})
        held = self._held.objects()
        self._batches += 1
        if get_worker_info() is not None:
            return self._read(places, held)
        with put_back(self._held):
            return self._read(places, held)

    def _read(self, places: Sequence[Place], held: list[object]) -> Any:
        samples = []
        for place in places:
            seed_all(self._key("sample", place), held)
            samples.append(self._dataset[place.sample])
        seed_all(self._key("batch", places[0]), held)
        batch = self._collate_fn(samples)
        if self._held is not None and not self._batches & (self._batches - 1):
            refuse_late(self._held)
        return batch

    def _key(self, kind: str, place: Place) -> bytes:
        # Hashed, for sums of seed, epoch and position would give neighbours the same stream.
        text = f"unbroken {kind}/{self._seed}/{place.epoch}/{place.position}"
        return hashlib.blake2b(text.encode(), digest_size=32).digest()


class _Batches:
    """What torch draws its batches of places from."""

    def __init__(self, shares: ElasticSampler, batch_sampler: BatchSampler) -> None:
        self._shares = shares
        self._cut = (batch_sampler.batch_size, batch_sampler.drop_last)
        self._begun = (0, 0)
        # Samples of the batches that torch has drawn and not handed out.
        self.in_flight: deque[Sequence[int]] = deque()

    def begin(self, place: tuple[int, int]) -> None:
        self._begun, self.in_flight = place, deque()

    def __iter__(self) -> Iterator[list[Place]]:
        epoch, position = self._begun
        places = self._shares.places(position)
        indices = self._shares.order(epoch, places)
        stands = (Place(epoch, *pair) for pair in zip(places, indices, strict=True))
        batches: Any = BatchSampler(cast("Any", stands), *self._cut)
        return self._noted(batches, self.in_flight)

    @staticmethod
    def _noted(batches: Iterable[list[Place]], drawn: deque[Sequence[int]]) -> Iterator[list[Place]]:
        for batch in batches:
            drawn.append(array("q", [place.sample for place in batch]))
            yield batch


def _check_keyed(loader: DataLoader[Any]) -> None:
    try:
        check_supported(loader)
    except UnsupportedStateError as error:
        raise UnsupportedStateError(
            f"keyed randomness: {error.message}",
            hint="give it a plain DataLoader over a dataset with __getitem__ and __len__, or leave out "
            "randomness='keyed'",
        ) from None


def _shared_seed(loader: DataLoader[Any]) -> int | None:
    sampler = getattr(loader.batch_sampler, "sampler", None)
    return sampler.seed if isinstance(sampler, (ElasticSampler, DistributedSampler)) else None


def _made_seed(loader: DataLoader[Any], name: str) -> int:
    # Asked for rather than drawn: a draw would move the stream that training draws from.
    source = torch.default_generator if loader.generator is None else loader.generator
    digest = hashlib.blake2b(f"unbroken loader/{source.initial_seed()}/{name}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little") >> 1


def _shares(loader: DataLoader[Any], seed: int) -> ElasticSampler:
    """Return the shares of a keyed order that stand for the loader's sampler."""
    batch_sampler: Any = loader.batch_sampler
    sampler = batch_sampler.sampler if is_plain(batch_sampler) else None
    data: Any = loader.dataset
    rank, world_size, shuffle = 0, 1, True
    settings: dict[str, bool] = {}
    covered: int | None = None
    if isinstance(sampler, ElasticSampler):
        rank, world_size, shuffle, covered = sampler.rank, sampler.world_size, sampler.shuffle, sampler.length
        settings = {"drop_last": sampler.drop_last, "pad": sampler.pad}
    elif type(sampler) is DistributedSampler:
        rank, world_size, shuffle = sampler.rank, sampler.num_replicas, sampler.shuffle
        settings = {"drop_last": sampler.drop_last, "pad": not sampler.drop_last}
        covered = len(cast("Any", sampler.dataset))
    elif type(sampler) is SequentialSampler:
        shuffle, covered = False, len(sampler.data_source)
    elif type(sampler) is RandomSampler and not sampler.replacement:
        covered = len(sampler.data_source) if sampler.num_samples == len(sampler.data_source) else None
    if covered != len(data):
        name = type(sampler if sampler is not None else batch_sampler).__name__
        raise UnsupportedStateError(
            f"loader: expected a sequential or shuffled order of all data for keyed randomness, found {name}",
            hint="use shuffle=True, a DistributedSampler or an ElasticSampler, or no randomness='keyed'",
        )
    return ElasticSampler(data, seed=seed, shuffle=shuffle, rank=rank, world_size=world_size, **settings)


def _as_it_is(batch: Any) -> Any:
    return batch
