"""What decides the order of a loader's samples besides random generators, and its place in the state."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

from torch.utils.data import DataLoader

from unbroken.frameworks.torch.elastic_sampler import ElasticSampler
from unbroken.frameworks.torch.index_stream import is_plain
from unbroken.frameworks.torch.loader_checks import (
    check_same_loader,
    differences,
    fingerprint,
    is_moved,
    may_change,
)
from unbroken.frameworks.torch.plain_attributes import PlainAttributes, changed
from unbroken.rundir.tell import tell

_State = dict[str, Any]
_Place = tuple[int, int]


class Order:
    """The settings, the plain attributes and, if it is elastic, the place of a loader's sampler."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        batch_sampler: Any = loader.batch_sampler
        self._loader = loader
        self._attributes = PlainAttributes(loader)
        self._first: _State | None = None  # plain attributes as the first pass of all began
        self._before: _State = {}  # and as this one did
        self._moved: set[str] = set()  # those that changed during a pass
        self._fingerprint: _State | None = None  # as it did
        self._batch_size = getattr(batch_sampler, "batch_size", None)
        self._sampler = batch_sampler.sampler if is_plain(batch_sampler) else None
        self._elastic = self._sampler if isinstance(self._sampler, ElasticSampler) else None
        self._place: _Place | None = None  # of the elastic sampler, where this pass began

    def begin(self) -> _Place | None:
        """Note what the order depends on as a pass begins; return where an elastic sampler does."""
        self._fingerprint, self._before = fingerprint(self._loader), self._attributes.values()
        self._first = self._before if self._first is None else {**self._before, **self._first}
        self._place = self._elastic.next_place if self._elastic is not None else None
        return self._place

    def end(self) -> None:
        """Note that the pass is over: the next one begins the next epoch."""
        if self._elastic is not None and self._place is not None and not self._elastic.is_epoch_set:
            self._elastic.begin_at(self._place[0] + 1, 0)
        self._place = None
        self._moved |= changed(self._before, self._attributes.values()).keys()

    def state(self, consumed: int) -> _State:
        """Return what is kept, after `consumed` samples since the pass began."""
        place = None
        if self._elastic is not None:
            place = self._elastic.next_place
            if self._place is not None:
                place = self._elastic.place_after(self._place, consumed)
        return {
            "fingerprint": self._fingerprint or fingerprint(self._loader),
            "attributes": self._changed_attributes(),
            "elastic": place,
        }

    def check(self, saved: _State) -> None:
        """Refuse another order or other data; say what changes where that leaves the order as it was."""
        kept, found = saved["fingerprint"], fingerprint(self._loader)
        said = "the next epoch begins with it"
        if not saved["between_epochs"] or saved["workers_start"] is not None:
            # A seed that the sampler itself changes is put back.
            may_differ = may_change(self._loader, kept) | saved["attributes"]["now"].keys()
            check_same_loader(kept, found, may_differ=may_differ)
            said = "training goes on with the next sample of the same order"
        # Between two epochs a loader may change: it begins anew.
        changes = differences(kept, found)
        if changes:
            tell(f"loader: {'; '.join(changes.values())}: {said}")

    def without_cut_off(self, saved: _State) -> _State:
        """Return `saved`, or the end of its epoch if batches of the old size left no more than they drop."""
        kept = saved["fingerprint"]
        is_cut_anew = kept["batch_size"] != self._batch_size or self.is_moved(saved)
        if saved["between_epochs"] or not kept["drop_last"] or not is_cut_anew:
            return saved
        left = self._left_of(saved)
        if left is None or left >= kept["batch_size"]:
            return saved
        place = (saved["elastic"][0] + 1, 0) if saved["elastic"] else None
        return {**saved, "between_epochs": True, "elastic": place}

    def restore(self, saved: _State) -> None:
        """Take over the attributes and the place, before the replay of a pass or between two."""
        kept, live = saved["attributes"], self._attributes.values()
        wanted = kept["before"]
        if saved["between_epochs"]:
            # What the script sets for each epoch it has set by now.
            names = set(kept["moved"]) | changed(kept["before"], kept["now"]).keys()
            wanted = {name: value for name, value in kept["now"].items() if name in names}
        self._attributes.put(wanted, where=kept["first"])
        self._moved = set(kept["moved"])
        self._first, self._before = {**live, **kept["first"]}, {**live, **kept["before"]}
        self._fingerprint = fingerprint(self._loader)
        is_set = self._elastic is not None and self._elastic.is_epoch_set and saved["between_epochs"]
        if self._elastic is not None and saved["elastic"] and not is_set:
            self._elastic.begin_at(*saved["elastic"])

    def go_on(self, saved: _State) -> _Place | None:
        """Return where an elastic sampler goes on in the pass of `saved`; others are replayed."""
        self._place = tuple(saved["elastic"]) if saved["elastic"] else None
        return self._place

    def after_replay(self, saved: _State) -> None:
        """Put the attributes of the dataset, which read nothing in the replay; samplers moved themselves."""
        of_data = {name: value for name, value in saved["attributes"]["now"].items() if "dataset" in name}
        self._attributes.put(of_data, where=self._before)

    def is_moved(self, saved: Mapping[str, Any]) -> bool:
        """Tell whether an elastic sampler has another share of the global order than it had."""
        return self._elastic is not None and is_moved(self._elastic, saved["fingerprint"])

    def _left_of(self, saved: _State) -> int | None:
        """Return how many samples the sampler had left, as far as it tells."""
        if self._elastic is not None:
            kept, position = saved["fingerprint"], saved["elastic"][1]
            begin = position + kept["sampler.rank"]
            return len(range(begin, self._elastic.length, kept["sampler.world_size"]))
        return len(self._sampler) - int(saved["samples"]) if isinstance(self._sampler, Sized) else None

    def _changed_attributes(self) -> _State:
        now = self._attributes.values()
        first, before = (now, now) if self._first is None else (self._first, self._before)
        names = sorted(changed(first, before).keys() | changed(before, now).keys() | self._moved)
        of_kind = {"first": first, "before": before, "now": now}
        kept = {kind: {name: of[name] for name in names if name in of} for kind, of in of_kind.items()}
        return {**kept, "moved": sorted(self._moved)}
