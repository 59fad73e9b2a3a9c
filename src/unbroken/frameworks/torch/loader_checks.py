"""Which loaders can be resumed exactly, and whether one is the loader that a state was taken from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, MapDataPipe

from unbroken.errors import StateMismatchError, UnsupportedStateError, UsageError
from unbroken.frameworks.torch.data_fingerprint import data_fingerprint
from unbroken.frameworks.torch.elastic_sampler import ElasticSampler
from unbroken.frameworks.torch.index_stream import is_plain

# An epoch number is not one of them: see plain_attributes.
_SAMPLER_SETTINGS = (
    "seed",
    "shuffle",
    "replacement",
    "num_samples",
    "rank",
    "num_replicas",
    "world_size",
    "drop_last",
    "pad",
)
_CUTTING = frozenset({"batch_size", "drop_last"})
_SHARING = frozenset({"sampler.rank", "sampler.world_size", "sampler.drop_last", "sampler.pad"})
_WORKERS = frozenset({"num_workers", "persistent_workers", "prefetch_factor"})
_OTHER_LOADER = "resume with the loader of the original run, or start a new run directory"
_OTHER_DATA = (
    "resume with the data of the original run, or start a new run directory; if it is the same data, give "
    "the dataset an attribute unbroken_fingerprint (any text, or False to compare nothing)"
)


def check_supported(loader: DataLoader[Any]) -> None:
    """Raise UnsupportedStateError if the loader has no order of batches that a resume could repeat."""
    if isinstance(loader.dataset, (IterableDataset, MapDataPipe)):
        found = f"a dataset with indices, found the stream {type(loader.dataset).__name__}"
        hint = "give the dataset __getitem__ and __len__, or state_dict and load_state_dict of its own"
    elif loader.batch_sampler is None:
        found = "batches of indices, found automatic batching off (batch_size=None)"
        hint = "pass batch_size, or a batch_sampler and a collate_fn that returns what the dataset gives"
    else:
        _check_iteration(loader, way_out="keep the position with the loader's own state_dict")
        return
    raise UnsupportedStateError(f"loader: expected {found}", hint=hint)


def check_supported_stream(loader: DataLoader[Any]) -> None:
    """Raise UnsupportedStateError if a loader over an IterableDataset gives batches in no fixed order."""
    if isinstance(loader.dataset, IterDataPipe):
        found = f"an IterableDataset, found the data pipe {type(loader.dataset).__name__}"
        hint = "make it an IterableDataset with state_dict and load_state_dict"
    else:
        _check_iteration(loader, way_out="give the loader state_dict and load_state_dict")
        return
    raise UnsupportedStateError(f"loader: expected {found}", hint=hint)


def _check_iteration(loader: DataLoader[Any], *, way_out: str) -> None:
    """Raise UnsupportedStateError unless batches come by torch's own iteration, in order."""
    kind = type(loader)
    if not loader.in_order:
        found = "batches in order, found in_order=False"
        hint = "leave in_order=True: without it the order depends on timing"
    elif kind.__iter__ is not DataLoader.__iter__ or kind._get_iterator is not DataLoader._get_iterator:
        found = f"torch's own iteration, found the one of {kind.__name__}"
        hint = f"wrap a plain DataLoader, or {way_out}"
    else:
        return
    raise UnsupportedStateError(f"loader: expected {found}", hint=hint)


def stream_fingerprint(loader: DataLoader[Any]) -> dict[str, object]:
    """Return what must be the same for a resume over an IterableDataset to be exact, as plain values."""
    return {
        "dataset": type(loader.dataset).__qualname__,
        "batch_size": loader.batch_size,
        "drop_last": loader.drop_last,
        "num_workers": loader.num_workers,
        "persistent_workers": loader.persistent_workers,
    }


def fingerprint(loader: DataLoader[Any]) -> dict[str, object]:
    """Return what must be the same for a resume to be exact, as plain values."""
    batch_sampler = loader.batch_sampler
    sampler = getattr(batch_sampler, "sampler", loader.sampler)
    return {
        **data_fingerprint(loader.dataset),
        "batch_sampler": type(batch_sampler).__qualname__,
        "sampler": type(sampler).__qualname__,
        **{
            f"sampler.{name}": value
            for name in _SAMPLER_SETTINGS
            if isinstance(value := getattr(sampler, name, None), (bool, int, float, str))
        },
        "batch_size": getattr(batch_sampler, "batch_size", None),
        "drop_last": getattr(batch_sampler, "drop_last", None),
        "num_workers": loader.num_workers,
        "persistent_workers": loader.persistent_workers,
        # How far indices are drawn in advance shows in the generators of an epoch that is left early.
        "prefetch_factor": loader.prefetch_factor,
    }


def may_change(loader: DataLoader[Any], saved: Mapping[str, object]) -> frozenset[str]:
    """Return the names in a fingerprint that may change inside an epoch: its order stays the same."""
    batch_sampler: Any = loader.batch_sampler
    if not is_plain(batch_sampler) or saved.get("batch_sampler") != type(batch_sampler).__qualname__:
        return frozenset()
    is_elastic = isinstance(batch_sampler.sampler, ElasticSampler)
    if not is_elastic or not is_moved(batch_sampler.sampler, saved):
        return _CUTTING
    return _CUTTING | _SHARING | _WORKERS


def is_moved(sampler: ElasticSampler, saved: Mapping[str, object]) -> bool:
    """Tell whether an elastic sampler has another share of the global order than in a fingerprint."""
    return any(
        getattr(sampler, name.removeprefix("sampler.")) != saved.get(name) for name in sorted(_SHARING)
    )


def differences(saved: Mapping[str, object], found: Mapping[str, object]) -> dict[str, str]:
    """Return what differs between two fingerprints, a text for each name."""
    return {
        name: f"{name}: checkpoint has {saved.get(name)!r}, found {found.get(name)!r}"
        for name in sorted(saved.keys() | found.keys())
        if saved.get(name) != found.get(name)
    }


def check_same_loader(
    saved: Mapping[str, object], found: Mapping[str, object], *, may_differ: Collection[str] = ()
) -> None:
    """Raise StateMismatchError, naming every difference, if one is not of those that may be."""
    found_differences = differences(saved, found)
    refused = found_differences.keys() - set(may_differ)
    if refused:
        is_other_data = any(name.startswith("dataset") for name in refused)
        raise StateMismatchError(
            "loader: " + "; ".join(found_differences.values()),
            hint=_OTHER_DATA if is_other_data else _OTHER_LOADER,
        )


def check_wish(restored: Mapping[str, object] | None, inside_epoch: bool) -> None:
    """Raise UsageError if what the caller wants to iterate is not what was restored."""
    if inside_epoch and restored is None:
        raise UsageError(
            "loader: expected a restored state to go on from, found none", hint="call restore(state) first"
        )
    if restored is not None and not inside_epoch and not restored["between_epochs"]:
        raise UsageError(
            f"loader: expected to go on in epoch {restored['epoch']} after batch {restored['batches']}, "
            "found a new epoch asked for",
            hint="pass inside_epoch=True; a new epoch would drop the rest of this one",
        )
