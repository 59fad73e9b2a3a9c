"""Which loaders can be resumed exactly, and whether one is the loader that a state was taken from."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, MapDataPipe

from unbroken.errors import StateMismatchError, UnsupportedStateError


def check_supported(loader: DataLoader[Any]) -> None:
    """Raise UnsupportedStateError if the loader has no order of batches that a resume could repeat."""
    kind = type(loader)
    if isinstance(loader.dataset, (IterableDataset, MapDataPipe)):
        found = f"a dataset with indices, found the stream {type(loader.dataset).__name__}"
        hint = "give the dataset __getitem__ and __len__, or state_dict and load_state_dict of its own"
    elif loader.batch_sampler is None:
        found = "batches of indices, found automatic batching off (batch_size=None)"
        hint = "pass batch_size, or a batch_sampler and a collate_fn that returns what the dataset gives"
    elif not loader.in_order:
        found = "batches in order, found in_order=False"
        hint = "leave in_order=True: without it the order depends on timing"
    elif kind.__iter__ is not DataLoader.__iter__ or kind._get_iterator is not DataLoader._get_iterator:
        found = f"torch's own iteration, found the one of {kind.__name__}"
        hint = "wrap a plain DataLoader, or keep the position with the loader's own state_dict"
    else:
        return
    raise UnsupportedStateError(f"loader: expected {found}", hint=hint)


def fingerprint(loader: DataLoader[Any]) -> dict[str, object]:
    """Return what must be the same for a resume to be exact, as plain values."""
    sampler, dataset = loader.batch_sampler, loader.dataset
    return {
        "dataset_length": len(dataset) if isinstance(dataset, Sized) else None,
        "batch_sampler": type(sampler).__qualname__,
        "sampler": type(getattr(sampler, "sampler", loader.sampler)).__qualname__,
        "batch_size": getattr(sampler, "batch_size", None),
        "drop_last": getattr(sampler, "drop_last", None),
        "num_workers": loader.num_workers,
        "persistent_workers": loader.persistent_workers,
        # How far indices are drawn in advance shows in the generators of an epoch that is left early.
        "prefetch_factor": loader.prefetch_factor,
    }


def check_same_loader(saved: Mapping[str, object], found: Mapping[str, object]) -> None:
    """Raise StateMismatchError, naming every difference between two fingerprints."""
    differences = [
        f"{name}: checkpoint has {saved.get(name)!r}, found {found.get(name)!r}"
        for name in sorted(saved.keys() | found.keys())
        if saved.get(name) != found.get(name)
    ]
    if differences:
        raise StateMismatchError(
            "loader: " + "; ".join(differences),
            hint="resume with the loader of the original run, or start a new run directory",
        )
