"""Batches whose position can be taken out and put into another process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Literal, Protocol, get_args

from unbroken.errors import StateMismatchError, UnsupportedStateError, UsageError
from unbroken.frameworks import epoch_start
from unbroken.frameworks.generators import HeldGenerators
from unbroken.frameworks.own_state import keeps_position
from unbroken.frameworks.places import holders
from unbroken.frameworks.reading_again import DrawWatch, told_of_reading
from unbroken.frameworks.stream import BY_READING, Stream, left_early
from unbroken.rundir.tell import tell
from unbroken.training import families

# Whose random numbers a loader's are: those of the stream without us, or those of each sample's position.
Randomness = Literal["capture", "keyed"]

MADE_IN_EACH_EPOCH = (
    "batches: a loader that was made in the body of an epoch is taken for one that is built anew in each, "
    "and begins as it was built; if the script keeps it, make it before the loop over epochs"
)
MADE_FOR_EACH_EVALUATION = (
    "batches: a nested loader that was made in the body of this epoch goes on where it was; if the script "
    "builds it anew for each evaluation, make it once"
)


def check_randomness(value: Randomness) -> None:
    """Raise UsageError for a randomness that there is not."""
    if value not in get_args(Randomness):
        raise UsageError(
            f"batches: expected randomness='capture' or 'keyed', found {value!r}",
            hint="leave it out to get the loader's own",
        )


class ResumableBatches(Protocol):
    """What the position needs of a loader; its framework knows how."""

    def state(self) -> dict[str, Any]:
        """Return the position as plain values."""

    def restore(self, state: dict[str, Any]) -> None:
        """Take over a position before the first `iterate`; raises StateMismatchError if it does not fit."""

    def iterate(
        self, *, inside_epoch: bool = False, after_replay: Callable[[], None] | None = None
    ) -> Iterator[Any]:
        """Return the batches of a pass: a new one, or with `inside_epoch` the rest of the restored one.

        What the beginning of a pass draws is drawn by the call, not at the first batch.
        """

    def generators(self) -> list[object]:
        """Return the random generators that a restore sets, the process's own ones aside."""

    def samples(self, back: int) -> list[Any] | None:
        """Return the indices of the samples in the batch handed out `back` batches ago, 1 for the newest.

        None where samples have no indices, and for what another pass or process handed out.
        """


class ResumableIterable:
    """Any iterable that begins anew each time, or that has a `state_dict` of its own.

    One with a state is continued by it. Of any other a resume reads the consumed items again, which is
    exact if the items depend on nothing but the iterable, the generators it holds and those of the process.
    """

    def __init__(self, items: Iterable[Any]) -> None:
        if isinstance(items, Iterator) and not keeps_position(items):
            raise UnsupportedStateError(
                f"batches: cannot go back in a {type(items).__name__}, which can be read once only",
                hint="pass a DataLoader, a list, or an object whose __iter__ starts anew, or give it "
                "state_dict() and load_state_dict()",
            )
        self._items = items
        self._held = HeldGenerators({"items": items})
        self._stream = Stream(items, partial(epoch_start.marked, self._held))
        self._start: dict[str, Any] = {}
        self._open: object = None  # the pass that is open, by an object of its own
        self._restored: dict[str, Any] | None = None
        self._is_told, self._is_left_told = isinstance(items, Sequence), False
        self._watch: DrawWatch | None = None
        # Random states to start a pass with that was gone on with and starts with its first item.
        self._late: dict[str, Any] | None = None
        self._was_late: bool | None = False

    def state(self) -> dict[str, Any]:
        if self._restored is not None:
            return {**self._restored, "generators": self._held.capture()}
        self._say_if_left()
        return {
            "consumed": self._stream.count,
            "is_open": self._open is not None,
            "start": self._start,
            "generators": self._held.capture(),
            "stream": self._stream.position(),
            "starts_late": self._starts_late(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._held.restore(state["generators"])
        self._start, self._restored = state["start"], state

    def generators(self) -> list[object]:
        return self._held.objects()

    def samples(self, back: int) -> list[Any] | None:
        return None

    def iterate(
        self, *, inside_epoch: bool = False, after_replay: Callable[[], None] | None = None
    ) -> Iterator[Any]:
        restored = self._restored
        if after_replay is not None:
            # First: the iterable may be a part as well, and is put to its position after that, once.
            after_replay()
        if inside_epoch and restored is not None:
            if not restored["is_open"]:
                return iter(())  # for the pass that follows
            self._go_on(restored)
        else:
            self._begin(restored)
        self._restored, self._open = None, object()
        return self._deliver(self._open)

    def _begin(self, restored: dict[str, Any] | None) -> None:
        self._start = epoch_start.snapshot(self._held)
        if restored is None:
            self._stream.begin()
        else:
            self._stream.begin_after(restored["stream"])
        if not self._is_told and self._stream.continued_by == BY_READING:
            tell(told_of_reading(self._items))
        self._is_told = True
        # Training draws from the generators of the process, too.
        is_read_again = self._stream.continued_by == BY_READING
        # What an earlier pass has told holds for this one.
        known = self._watch.items_draw if self._watch is not None else False if self._was_late else None
        self._watch = DrawWatch(self._items, is_read_again=is_read_again, items_draw=known)
        self._late = None

    def _starts_late(self) -> bool | None:
        """Tell whether the first item draws what belongs to the start of a pass; None if nobody knows."""
        if self._watch is None or not self._watch.start_draws:
            return self._watch is None and self._was_late
        return None if self._watch.items_draw is None else not self._watch.items_draw

    def _go_on(self, restored: dict[str, Any]) -> None:
        now = {**epoch_start.snapshot(self._held), "generators": restored["generators"]}
        epoch_start.apply(self._held, self._start)
        self._stream.go_on(restored["stream"])
        self._was_late = restored["starts_late"]
        is_anew = self._stream.continued_by != BY_READING
        self._late = epoch_start.snapshot(self._held) if is_anew and self._was_late else None
        if is_anew and self._was_late is None:
            tell(
                f"batches: {type(self._items).__name__} drew random numbers with its first item. If they "
                "belong to the start of a pass, they are drawn once more now, and training draws others "
                "than it would have"
            )
        epoch_start.apply(self._held, now)

    def _deliver(self, this: object) -> Iterator[Any]:
        try:
            while True:
                if self._open is not this:
                    raise UsageError(
                        "batches: expected one pass at a time over an iterable, found an item asked of an "
                        "earlier one",
                        hint="pass a second object to read it twice at once",
                    )
                self._before_item()
                try:
                    item = self._next()
                except StopIteration:
                    return
                self._after_item()
                # While it waits, this frame must not keep the batch alive.
                batch = [item]
                del item
                yield batch.pop()
        finally:
            if self._open is this:
                self._open = None

    def _say_if_left(self) -> None:
        if self._start and not (self._open or self._stream.may_be_left or self._is_left_told):
            self._is_left_told = True
            tell(f"batches: {left_early(self._items)}; no resume from this position is possible")

    def _next(self) -> Any:
        late, self._late = self._late, None
        if late is None:
            return next(self._stream)
        # A generator function starts with its first item: what that draws was drawn before the checkpoint.
        now = epoch_start.snapshot(self._held)
        epoch_start.apply(self._held, late)
        try:
            return next(self._stream)
        finally:
            epoch_start.apply(self._held, now)

    def _before_item(self) -> None:
        if self._watch is not None:
            self._watch.before()

    def _after_item(self) -> None:
        if self._watch is not None:
            self._watch.after()
        self._stream.check_moves()


class Batches:
    """The batches of a loader, for one `for` loop or for several: each begins a pass."""

    def __init__(self, begin_pass: Callable[[], Iterator[Any]], loader: object) -> None:
        self._begin_pass = begin_pass
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return self._begin_pass()

    def __len__(self) -> int:
        """The length of a whole pass, where the loader knows it."""
        return len(self._loader)  # type: ignore[arg-type]


def resumable(
    loader: object, name: str | None = None, randomness: Randomness = "capture"
) -> ResumableBatches:
    """Return `loader` made resumable. Raises UnsupportedStateError for what cannot be resumed exactly."""
    is_keyed = randomness == "keyed"
    found: ResumableBatches | None = (
        families.keyed_loader(loader, name or "") if is_keyed else families.resumable_loader(loader)
    )
    if found is None and isinstance(loader, Iterable) and not is_keyed:
        found = ResumableIterable(loader)
    if found is None:
        wanted = "for randomness='keyed'" if is_keyed else "or an iterable"
        raise UnsupportedStateError(
            f"batches: expected a DataLoader {wanted}, found a {type(loader).__name__}",
            hint="leave out randomness='keyed'" if is_keyed else "pass the loader itself",
        )
    return found


@dataclass(slots=True, eq=False)
class Slot:
    """A loader with a place in the position; `loader` is None until this process has met it.

    `is_rebuilt`: the script makes a new loader each epoch, so that only what `outlives` it is carried over;
    None as long as nobody can know. One with keyed randomness goes on all the same. `epoch` is that of its
    latest pass; None if each evaluation builds it. `takes_steps`: a pass of this process took one. `shared`
    is what the loader before this one held, too. `number` counts the batches that its latest pass has handed
    out or left out, in this process and before.
    """

    name: str | None = None
    randomness: Randomness = "capture"
    loader: object = None
    batches: ResumableBatches | None = None
    restored: dict[str, Any] | None = None
    is_rebuilt: bool | None = None
    epoch: int | None = None
    takes_steps: bool = False
    outlives: Sequence[str] = ()
    shared: list[object] | None = None
    is_told: bool = False
    number: int = 0

    def bind(self, loader: object) -> ResumableBatches:
        if self.batches is None or self.loader is not loader:
            earlier, is_keyed = self.batches, self.randomness == "keyed"
            batches = resumable(loader, self.name, self.randomness)
            if is_keyed and earlier is not None:
                batches.restore(earlier.state())
            self.loader, self.batches = loader, batches
        return self.batches

    def check(self, randomness: Randomness) -> None:
        if self.randomness != randomness:
            raise StateMismatchError(
                f"batches: expected randomness={self.randomness!r}, with which this loader began, "
                f"found {randomness!r}",
                hint="go on with it, or start a new run directory; if it is another loader than the run has "
                "had so far, name it: run.batches(loader, name='fine-tuning')",
            )

    @property
    def is_in_doubt(self) -> bool:
        """Whether a restore would be wrong for a loader that the script makes anew each epoch."""
        return self.is_rebuilt is None and self.randomness != "keyed" and carries_state(self.restored or {})

    def replace(self, fresh: Slot) -> None:
        """Take over the loader that the script has made in the stead of this one."""
        earlier = [*self.holders(count()).values()]
        now = fresh.holders(count()).values()
        self.shared = [holder for holder in now if any(holder is other for other in earlier)]
        self.loader, self.batches, self.is_rebuilt = fresh.loader, fresh.batches, True

    def holders(self, paths: Iterable[Any]) -> dict[Any, object]:
        """Return what has a state of its own in the loader, by names as in `held_by`; `paths` in order."""
        generators = [] if self.batches is None else self.batches.generators()
        return holders(self.loader, dict(zip(paths, generators, strict=False)))

    def state(self) -> dict[str, Any]:
        kept = self.restored if self.batches is None or self.restored is not None else self.batches.state()
        if self.shared is not None and kept is not None:
            found = self.holders(sorted(kept["generators"])).items()
            self.outlives = [name for name, of in found if any(of is other for other in self.shared)]
            attributes = kept.get("attributes", {}).get("now", ())
            lost = sorted(name for name in attributes if name.partition(".")[0] in self.outlives)
            if lost and not self.is_told:
                self.is_told = True
                tell(f"batches: a resume would not bring back {', '.join(lost)}; build the loader once only")
        of_loader = {"is_rebuilt": self.is_rebuilt, "epoch": self.epoch, "outlives": self.outlives}
        of_loader["batches"] = self.number
        return {"name": self.name, "state": kept, **of_loader}

    def look(self) -> tuple[Any, ...]:
        """Return what tells this loader from the others that this process has met."""
        kept = self.state()["state"]
        return self.name, self.randomness, looks(kept), sorted(kept["generators"])


def carries_state(state: dict[str, Any]) -> bool:
    """Tell whether a loader's state matters between two passes: generators, workers that live on, epochs."""
    counts = "keyed" in state or state.get("elastic") is not None or state.get("attributes", {}).get("now")
    lives_on = state.get("generators") or state.get("workers_start") is not None
    return bool(counts or lives_on or _has_own(state))


def held_by(state: dict[str, Any], is_holder: Callable[[str], bool]) -> dict[str, Any]:
    """Return `state` with the state of some holders only: generators, "sampler", "dataset" and "loader"."""
    found = {**state, "generators": {k: v for k, v in state["generators"].items() if is_holder(k)}}
    if not is_holder("dataset") or (state.get("workers_start") and not is_holder("loader")):
        found["workers"] = {}
    if not is_holder("sampler"):
        found["elastic"] = None
    if not is_holder("loader"):
        found |= {"workers_start": None, "attributes": {"first": {}, "before": {}, "now": {}, "moved": []}}
        found |= {"stream": {**state["stream"], "object": None}} if "stream" in state else {}
    return found


def looks(state: dict[str, Any]) -> dict[str, Any]:
    """Return what loaders can be told apart by: their data, and how batches are made of them."""
    found = state.get("fingerprint", {})
    # The seed of a keyed loader is the one that the checkpoint will bring.
    return {name: value for name, value in found.items() if name != "seed"}


def data(state: dict[str, Any]) -> dict[str, Any]:
    """Return the part of it that stands for the data."""
    return {name: value for name, value in looks(state).items() if name.startswith("dataset")}


def _has_own(state: dict[str, Any]) -> bool:
    streams = [state.get("stream"), *(of.get("stream") for of in state.get("workers", {}).values())]
    return any(stream is not None and stream["object"] is not None for stream in streams)
