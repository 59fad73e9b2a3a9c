"""Numbers and texts that samplers and datasets keep, such as an epoch that a sampler counts itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

from unbroken.frameworks.torch.elastic_sampler import ElasticSampler
from unbroken.frameworks.torch.index_stream import is_plain

_KINDS = (bool, int, float, str, type(None))
_DEEPEST = 4
Values = dict[str, Any]


class PlainAttributes:
    """The plain attributes of a loader's samplers and dataset, by names such as `sampler.epoch`.

    Two kinds of them change from epoch to epoch: those that the script sets before each pass, which it
    does in a resumed process too, and those that move by themselves while a pass is made, which nothing
    but their state brings back. The second are known by two marks: they changed since the pass began,
    and in a new process they are what they were in the first one.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._owners = _owners(loader)

    def values(self) -> Values:
        """Return all values by name."""
        return {
            f"{owner}.{name}": value
            for owner, found in self._owners.items()
            for name, value in getattr(found, "__dict__", {}).items()
            if type(value) in _KINDS
        }

    def put(self, wanted: Mapping[str, Any], *, where: Mapping[str, Any]) -> None:
        """Set those of `wanted` whose value now is the one in `where`, and differs."""
        now = self.values()
        for name, value in wanted.items():
            if name in now and name in where and now[name] == where[name] != value:
                owner, _, attribute = name.rpartition(".")
                vars(self._owners[owner])[attribute] = value


def changed(before: Values, now: Values) -> Values:
    """Return those values of `now` that are others than in `before`."""
    return {name: value for name, value in now.items() if name not in before or before[name] != value}


def _owners(loader: DataLoader[Any]) -> dict[str, object]:
    batch_sampler: Any = loader.batch_sampler
    found: dict[str, object] = {}
    if not is_plain(batch_sampler):
        found["batch_sampler"] = batch_sampler
    _follow(found, "sampler", getattr(batch_sampler, "sampler", None))
    _follow(found, "dataset", loader.dataset)
    return found


def _follow(found: dict[str, object], name: str, owner: object) -> None:
    """Add `owner` and what it wraps: the sampler of a sampler, the dataset of a dataset."""
    path = name
    # An elastic sampler's place is kept by itself.
    while owner is not None and path.count(".") < _DEEPEST and not isinstance(owner, ElasticSampler):
        found[path] = owner
        owner, path = getattr(owner, "__dict__", {}).get(name), f"{path}.{name}"
